"""Keeps the sequences of a packed row apart in LFM2's short convolutions.

TRL packs several sequences into one row and restarts position_ids with each. Attention backends follow the restarts,
the short convolution does not: its taps reach conv_L_cache - 1 tokens back, over the border, and PyTorch's fallback in
transformers swallows the argument (`seq_idx`) that could tell it. Through these few tokens the whole following sequence
is computed wrong.

`isolate(model)` gives the convolutions of a loaded model the borders, from position_ids, inside the model's own
forward: before the convolution the sequences are moved conv_L_cache - 1 zeros apart, which is what each would see
alone. It is the same convolution on the same numbers, so it is exact in every dtype, forward and backward, with
gradient checkpointing, under PEFT, and on any device without a kernel from the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Borders:
    """Where the tokens of a batch lie once its packed sequences are `reach` zeros apart, each with zeros before it.

    `slots` (B * T,) int64 are the places of the tokens, row after row, in `size` places.
    """

    slots: torch.Tensor
    size: int
    reach: int
    packed: bool  # some row holds more than one sequence

    @classmethod
    def of(cls, position_ids: torch.Tensor, batch: int, reach: int) -> Borders:
        """From position_ids (1 or B, T), which restart at 0 with each sequence; looked at once a forward, because the
        size has to be waited for on a GPU."""
        starts = position_ids == 0
        starts[:, 0] = True
        starts = starts.expand(batch, -1).flatten()
        slots = torch.arange(starts.shape[0], device=starts.device) + reach * starts.cumsum(0)
        ends = torch.stack([slots[-1], starts.sum()]).tolist()
        return cls(slots, ends[0] + 1, reach, packed=ends[1] > batch)


def isolated_conv(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, borders: Borders
                  ) -> torch.Tensor:
    """Causal depthwise convolution of (B, D, T) with (D, reach + 1) that never reaches into another sequence.

    Returns (B, D, T) in the dtype of `hidden`.
    """
    batch, width, length = hidden.shape
    row = hidden.transpose(0, 1).reshape(width, batch * length).to(weight.dtype)
    spread = row.new_zeros(width, borders.size).index_copy(1, borders.slots, row)
    out = F.conv1d(spread[None], weight[:, None], bias, groups=width)[0].index_select(1, borders.slots - borders.reach)
    return out.reshape(width, batch, length).transpose(0, 1).to(hidden.dtype)


def _forward(self: Lfm2ShortConv, hidden_states: torch.Tensor, past_key_values: Any = None,
             attention_mask: torch.Tensor | None = None, seq_idx: Borders | None = None) -> torch.Tensor:
    """Lfm2ShortConv.forward, in which seq_idx counts; with a cache (generation) it is the stock one."""
    if past_key_values is not None:
        if seq_idx is not None and seq_idx.packed:
            raise ValueError("a packed row cannot be computed with a cache: pass use_cache=False")
        return type(self).forward(self, hidden_states, past_key_values, attention_mask)
    if seq_idx is None:
        raise ValueError("the short convolution was called without its decoder layer, which hands it the borders")
    hidden_states = modeling_lfm2.apply_mask_to_padding_states(hidden_states, attention_mask)
    b, c, x = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
    y = c * isolated_conv(b * x, self.conv.weight.squeeze(1), self.conv.bias, seq_idx)
    return self.out_proj(y.transpose(-1, -2).contiguous())


class HandDown:
    """Forward pre-hook of a model's layers, which get position_ids from the model: hands their convolution the borders.

    It runs within the layer's call, so also when gradient checkpointing repeats it, with the same position_ids.
    """

    def __init__(self) -> None:
        self.last: tuple[torch.Tensor, int, Borders] | None = None

    def __call__(self, layer: Lfm2DecoderLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
                 ) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if positions is None:
            raise ValueError("an LFM2 layer was called without position_ids, by which packed sequences are kept apart")
        batch = args[0].shape[0]
        if self.last is None or self.last[0] is not positions or self.last[1] != batch:
            self.last = positions, batch, Borders.of(positions, batch, layer.conv.conv.kernel_size[0] - 1)
        return args, kwargs | {"seq_idx": self.last[2]}


def isolate(model: torch.nn.Module) -> int:
    """Installs the isolation on every short convolution of `model`, PEFT-wrapped or not; returns their number.

    A second call changes nothing. Raises UnknownLfm2Code where transformers' code is not the known one.
    """
    layers = [m for m in model.modules() if isinstance(m, Lfm2DecoderLayer) and not m.is_attention_layer]
    if layers:
        check_shape()
    hook = HandDown()
    for layer in layers:
        if not is_isolated(layer):
            layer.register_forward_pre_hook(hook, with_kwargs=True)
            layer.conv.forward = MethodType(_forward, layer.conv)
    return len(layers)


def is_isolated(layer: Lfm2DecoderLayer) -> bool:
    return "forward" in vars(layer.conv)
