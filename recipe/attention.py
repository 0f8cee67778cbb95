"""Attention over packed rows for the trainer, and the choice of the backend.

TRL packs several sequences into one row: their tokens are concatenated and position_ids restart at 0. A backend must
keep them apart. `flash-attn3` (Hopper, a kernel from the Hub) does so by itself; `sdpa-packed` below runs anywhere:
PyTorch's scaled_dot_product_attention over one block of the diagonal after the other, so neither time nor memory grows
with the square of the row.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

FLASH_ATTN3 = "kernels-community/flash-attn3"
# A name without a slash: one with a slash is taken for a repository on the Hub and downloaded.
SDPA_PACKED = "sdpa-packed"
HOPPER = (9, 0)  # compute capability that flash-attn3 needs


def sequence_spans(position_ids: torch.Tensor) -> list[tuple[int, int]]:
    """[start, end) of every packed sequence; `position_ids` is (T,) and restarts at 0 with each of them."""
    starts = [0, *(position_ids[1:] == 0).nonzero().flatten().add(1).tolist(), position_ids.numel()]
    return list(zip(starts[:-1], starts[1:], strict=True))


def packed_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                     position_ids: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence.

    `query` is (1, heads, T, d), `key` and `value` (1, kv_heads, T, d), `position_ids` (1, T); returns (1, T, heads, d).
    Raises ValueError where packing cannot be told apart: a mask, a batch, a cache, or no position_ids.
    """
    rows, _, length, _ = query.shape
    if attention_mask is not None or position_ids is None or rows != 1 or key.shape[2] != length:
        raise ValueError(f"{SDPA_PACKED} attention takes one packed row with position_ids, without mask and cache; got "
                         f"{rows} rows, mask={attention_mask is not None}, position_ids={position_ids is not None}, "
                         f"{length} queries for {key.shape[2]} keys")
    blocks = [sdpa_attention_forward(module, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], None, dropout=dropout,
                                     scaling=scaling, is_causal=True)[0]
              for a, b in sequence_spans(position_ids[0])]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)), None


def _no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """Builds no T x T mask; a padding mask is handed on, for packed_attention to refuse."""
    return attention_mask


def register() -> None:
    """Makes "sdpa-packed" a value of transformers' attn_implementation."""
    AttentionInterface.register(SDPA_PACKED, packed_attention)
    AttentionMaskInterface.register(SDPA_PACKED, _no_mask)


def choose(setting: str) -> str:
    """The transformers name of the backend for Settings.attention; `auto` looks at the first GPU."""
    if setting == "auto":
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(0) == HOPPER
        return FLASH_ATTN3 if hopper else SDPA_PACKED
    return {"flash-attn3": FLASH_ATTN3, "sdpa-packed": SDPA_PACKED}[setting]
