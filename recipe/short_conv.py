"""Keeps the sequences of a packed row apart in LFM2's short convolutions.

TRL packs several sequences into one row and restarts position_ids with each. Attention backends follow the restarts,
the short convolution does not: its taps reach conv_L_cache - 1 tokens back, over the border, and PyTorch's fallback in
transformers swallows the argument (`seq_idx`) that could tell it. Through these few tokens the whole following sequence
is computed wrong.

`isolate(model)` gives the convolutions of a loaded model the position_ids, inside the model's own forward, and computes
them tap by tap: a tap that reaches k tokens back counts where the token's position in its sequence is at least k. Each
sequence is computed as it is alone, in every dtype, forward and backward, with gradient checkpointing, under PEFT, and
on any device without a kernel from the Hub. Sums are taken in float32 and rounded once, as convolution kernels do.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.lfm2.modeling_lfm2 import Lfm2DecoderLayer, Lfm2Model, Lfm2ShortConv

from recipe.trl_shape import missing_source

# What the replacement below repeats or relies on, white space apart.
EXPECTED = {
    Lfm2ShortConv.forward: (
        "hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)",
        "BCx = self.in_proj(hidden_states).transpose(-1, -2) B, C, x = BCx.chunk(3, dim=-2) hidden_states = B * x",
        "causal_conv1d_fn(hidden_states, self.conv.weight.squeeze(1), self.conv.bias, seq_idx=seq_idx)",
        "y = C * hidden_states y = y.transpose(-1, -2).contiguous() y = self.out_proj(y) return y"),
    Lfm2DecoderLayer.forward: ('attention_mask=attention_mask, seq_idx=kwargs.get("seq_idx"),',),
    Lfm2Model.forward: ("position_ids=position_ids, past_key_values=past_key_values, **kwargs,",),
}


class UnknownLfm2Code(RuntimeError):
    """The installed transformers computes LFM2 in another way than the one that is replaced here."""


def check_shape(expected: dict[Any, tuple[str, ...]] = EXPECTED) -> None:
    """Raises UnknownLfm2Code when transformers' LFM2 is not the code that the replacement was written against."""
    for function, fragments in expected.items():
        missing = missing_source(function, fragments)
        if missing is not None:
            raise UnknownLfm2Code(
                f"{function.__qualname__} of transformers {transformers.__version__} does not contain `{missing}`. "
                "Packed sequences cannot be kept apart in code that is not known: install the version in "
                "requirements/trainer.txt (bash setup.sh), or adapt recipe/short_conv.py and its test.")


def isolated_conv(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor
                  ) -> torch.Tensor:
    """Causal depthwise convolution of (B, T, D) with `weight` (D, taps) that never reaches into another sequence.

    `positions` (1 or B, T) restart at 0 with each sequence. Returns (B, T, D) in the dtype of `hidden`.
    """
    length, taps = hidden.shape[1], weight.shape[1]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    inputs, weight = hidden.to(wide), weight.to(wide)
    out = inputs * weight[:, -1]
    for back in range(1, taps):
        earlier = F.pad(inputs, (0, 0, back, 0))[:, :length]
        out = out + earlier * (positions >= back)[..., None] * weight[:, taps - 1 - back]
    return (out if bias is None else out + bias).to(hidden.dtype)


def _forward(self: Lfm2ShortConv, hidden_states: torch.Tensor, past_key_values: Any = None,
             attention_mask: torch.Tensor | None = None, seq_idx: torch.Tensor | None = None) -> torch.Tensor:
    """Lfm2ShortConv.forward, in which seq_idx counts: position_ids. With a cache (generation) it is the stock one."""
    if past_key_values is not None:
        if seq_idx is not None and bool((seq_idx[:, 1:] < seq_idx[:, :-1]).any()):
            raise ValueError("a packed row cannot be computed with a cache: pass use_cache=False")
        return type(self).forward(self, hidden_states, past_key_values, attention_mask)
    if seq_idx is None:
        raise ValueError("the short convolution was called without its decoder layer, which hands it position_ids")
    hidden_states = modeling_lfm2.apply_mask_to_padding_states(hidden_states, attention_mask)
    b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
    return self.out_proj(c * isolated_conv(b * x, self.conv.weight.squeeze(1), self.conv.bias, seq_idx))


def _hand_down(layer: Lfm2DecoderLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
               ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a layer, which gets position_ids from the model: hands them to its convolution."""
    if kwargs.get("position_ids") is None:
        raise ValueError("an LFM2 layer was called without position_ids, by which packed sequences are kept apart")
    return args, kwargs | {"seq_idx": kwargs["position_ids"]}


def isolate(model: torch.nn.Module) -> int:
    """Installs the isolation on every short convolution of `model`, PEFT-wrapped or not; returns their number.

    A second call changes nothing. Raises UnknownLfm2Code where transformers' code is not the known one.
    """
    layers = [m for m in model.modules() if isinstance(m, Lfm2DecoderLayer) and not m.is_attention_layer]
    if layers:
        check_shape()
    for layer in layers:
        if not is_isolated(layer):
            layer.register_forward_pre_hook(_hand_down, with_kwargs=True)
            layer.conv.forward = MethodType(_forward, layer.conv)
    return len(layers)


def is_isolated(layer: Lfm2DecoderLayer) -> bool:
    return "forward" in vars(layer.conv)
