"""Attention over packed rows for the trainer, and the choice of the backend.

TRL packs several sequences into one row: their tokens are concatenated and position_ids restart at 0. A backend must
keep them apart. Three do, all causal within each sequence, none with memory that grows with the square of the row:

  flash-attn3   a kernel from the Hub (package `kernels`, downloaded when the model is loaded); Hopper
  varlen        torch.nn.attention.varlen.varlen_attn, PyTorch's own flash attention; no download, Ampere and newer,
                torch >= 2.10, bfloat16
  sdpa-packed   PyTorch's scaled_dot_product_attention over one block of the diagonal after the other; anywhere
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from recipe.config import SettingsError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None

FLASH_ATTN3 = "kernels-community/flash-attn3"
# Names without a slash: one with a slash is taken for a repository on the Hub and downloaded.
SDPA_PACKED = "sdpa-packed"
VARLEN = "varlen"
NAMES = {"flash-attn3": FLASH_ATTN3, "varlen": VARLEN, "sdpa-packed": SDPA_PACKED}
HOPPER, AMPERE = (9, 0), (8, 0)  # compute capabilities


def sequence_spans(position_ids: torch.Tensor) -> list[tuple[int, int]]:
    """[start, end) of every packed sequence; `position_ids` is (T,) and restarts at 0 with each of them."""
    starts = [0, *(position_ids[1:] == 0).nonzero().flatten().add(1).tolist(), position_ids.numel()]
    return list(zip(starts[:-1], starts[1:], strict=True))


def require_one_row(name: str, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None,
                    position_ids: torch.Tensor | None) -> None:
    """Raises ValueError where packing cannot be told apart: a mask, a batch, a cache, or no position_ids."""
    rows, _, length, _ = query.shape
    if attention_mask is not None or position_ids is None or rows != 1 or key.shape[2] != length:
        raise ValueError(f"{name} attention takes one packed row with position_ids, without mask and cache; got "
                         f"{rows} rows, mask={attention_mask is not None}, position_ids={position_ids is not None}, "
                         f"{length} queries for {key.shape[2]} keys")


@torch.compiler.disable  # borders are read on the host: compiled layers go around it
def packed_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                     position_ids: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence.

    `query` is (1, heads, T, d), `key` and `value` (1, kv_heads, T, d), `position_ids` (1, T); returns (1, T, heads, d).
    Raises ValueError where sequences cannot be told apart.
    """
    require_one_row(SDPA_PACKED, query, key, attention_mask, position_ids)
    blocks = [sdpa_attention_forward(module, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], None, dropout=dropout,
                                     scaling=scaling, is_causal=True)[0]
              for a, b in sequence_spans(position_ids[0])]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)), None


@torch.compiler.disable
def varlen_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                     position_ids: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
    """The same by PyTorch's varlen_attn; same shapes, same errors."""
    require_one_row(VARLEN, query, key, attention_mask, position_ids)
    if dropout > 0:
        raise ValueError("varlen attention has no dropout")
    starts = [a for a, _ in sequence_spans(position_ids[0])] + [position_ids.shape[1]]
    longest = max(b - a for a, b in zip(starts[:-1], starts[1:], strict=True))
    cumulative = torch.tensor(starts, dtype=torch.int32, device=query.device)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, d)
    if torch.is_autocast_enabled(query.device.type):  # of fp32 weights: norms hand on fp32, the kernel takes bf16 alone
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    grouped = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped = {"enable_gqa": True}
        else:
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    out = varlen_attn(query, key, value, cumulative, cumulative, longest, longest, scale=scaling,
                      window_size=(-1, 0), **grouped)  # everything to the left, nothing to the right: causal
    return out[None], None


def _no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """Builds no T x T mask; a padding mask is handed on, for packed_attention to refuse."""
    return attention_mask


def register() -> None:
    """Makes "sdpa-packed" and "varlen" values of transformers' attn_implementation."""
    for name, function in ((SDPA_PACKED, packed_attention), (VARLEN, varlen_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _no_mask)


def unavailable(name: str, dtype: str) -> str | None:
    """Why backend `name` cannot run on this machine with weights of `dtype`; None when it can."""
    if name == "sdpa-packed":
        return None
    if not torch.cuda.is_available():
        return "there is no GPU"
    capability = torch.cuda.get_device_capability(0)
    if dtype == "float32":
        return "it computes in bfloat16 only, and DTYPE is float32"
    if name == "flash-attn3":
        if capability != HOPPER:
            return f"it needs compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
        if not importlib.util.find_spec("kernels"):
            return "the package `kernels`, which downloads it, is missing"
        cached = any(Path(constants.HF_HUB_CACHE).glob("*kernels-community--flash-attn3"))
        offline = constants.HF_HUB_OFFLINE and not cached
        return "it is not in the Hub cache, and HF_HUB_OFFLINE is set" if offline else None
    if capability < AMPERE:
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return None if varlen_attn is not None else f"it needs torch 2.10, and this is {torch.__version__}"


def choose(setting: str, dtype: str) -> tuple[str, str]:
    """transformers' name of the backend for Settings.attention, and a sentence that says which one and why.

    `auto` takes the first of flash-attn3, varlen, sdpa-packed that runs here. Raises SettingsError for a backend that
    was asked for by name and does not.
    """
    reasons = {name: unavailable(name, dtype) for name in NAMES}
    if setting == "auto":
        name = next(n for n, reason in reasons.items() if reason is None)
        passed = [f"not {n}: {reason}" for n, reason in reasons.items() if reason is not None]
        return NAMES[name], f"attention: {name}" + (f" ({'; '.join(passed)})" if passed else "")
    if reasons[setting]:
        raise SettingsError(f"ATTENTION={setting}: {reasons[setting]}. Set ATTENTION=auto, which takes what runs here.")
    return NAMES[setting], f"attention: {setting}, as set"
