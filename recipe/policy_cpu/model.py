"""The forward pass of Lfm2 over one flat batch of tokens, with the state of each sequence beside it.

transformers' `Lfm2ForCausalLM` loads the weights and is what the tests compare with (log-probs within 1e-4), but
its own forward does not run here: its cache has one length for the whole batch, cannot start from a copied prefix
whose short-conv state belongs to it, and costs about 4 ms of Python a token at this size. Here the tokens of all
sequences of a step lie side by side, as in vLLM: every linear layer sees them all, and only the two operators that
look back, attention and short convolution, run per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe.policy_cpu.weights import LayerWeights, ModelWeights


@dataclass(eq=False)
class SequenceState:
    """What one sequence has computed so far.

    kv: (attention layers, 2, kv heads, capacity, head dim); `length` positions of it are valid.
    conv: per conv layer the last kernel−1 inputs of the short convolution, (hidden, kernel−1).
    boundaries: position → conv states there, for positions that are a multiple of the prefix cache's block; the
    cache takes them. States are never written in place, so a reference is a snapshot.
    """

    kv: Tensor
    conv: list[Tensor]
    length: int = 0
    boundaries: dict[int, list[Tensor]] = field(default_factory=dict)

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` positions; doubling keeps the copying linear in the final length."""
        have = self.kv.shape[3]
        if capacity > have:
            grown = self.kv.new_empty(*self.kv.shape[:3], max(capacity, 2 * have), self.kv.shape[4])
            grown[:, :, :, : self.length] = self.kv[:, :, :, : self.length]
            self.kv = grown


@dataclass(eq=False)
class Segment:
    """New tokens of one sequence in this step: one while it decodes, many while its prompt is computed."""

    state: SequenceState
    tokens: list[int]


class Lfm2Runner:
    """Runs batches for one architecture; the weights come with each call, so base and adapters share it.

    config: an Lfm2Config. rope: (cos, sin), each (max positions, head dim), from transformers' rotary embedding.
    block: positions between two conv snapshots.
    """

    def __init__(self, config, rope: tuple[Tensor, Tensor], dtype: torch.dtype, block: int) -> None:
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden, self.eps, self.taps = config.hidden_size, config.norm_eps, config.conv_L_cache
        self.kinds = ["attention" if kind == "full_attention" else "conv" for kind in config.layer_types]
        self.cos, self.sin, self.dtype, self.block = *rope, dtype, block

    def new_state(self, capacity: int) -> SequenceState:
        layers = self.kinds.count("attention")
        kv = torch.empty(layers, 2, self.kv_heads, capacity, self.head_dim, dtype=self.dtype)
        past = torch.zeros(self.hidden, self.taps - 1, dtype=self.dtype)
        return SequenceState(kv, [past] * self.kinds.count("conv"))

    @torch.inference_mode()
    def forward(self, weights: ModelWeights, segments: list[Segment]) -> Tensor:
        """Appends the segments' tokens to their states and returns the final hidden states, (tokens, hidden).

        Rows follow the order of the segments. Segments of one token must come first: their short convolutions
        run as one batch.
        """
        positions = [p for s in segments for p in range(s.state.length, s.state.length + len(s.tokens))]
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        for segment in segments:
            segment.state.reserve(segment.state.length + len(segment.tokens))
        x = F.embedding(torch.tensor([t for s in segments for t in s.tokens]), weights.embed)
        attention_layer = conv_layer = 0
        for kind, layer in zip(self.kinds, weights.layers, strict=True):
            normed = F.rms_norm(x, (self.hidden,), layer.norm, self.eps)
            if kind == "attention":
                x = x + self._attention(layer, attention_layer, normed, cos, sin, segments)
                attention_layer += 1
            else:
                x = x + self._short_conv(layer, conv_layer, normed, segments)
                conv_layer += 1
            gate, up = F.linear(F.rms_norm(x, (self.hidden,), layer.ffn_norm, self.eps), layer.w13).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.w2)
        for segment in segments:
            segment.state.length += len(segment.tokens)
        return F.rms_norm(x, (self.hidden,), weights.final_norm, self.eps)

    def logits(self, weights: ModelWeights, hidden: Tensor) -> Tensor:
        """(rows, hidden) → (rows, vocabulary) in float32, whatever dtype the weights have."""
        with torch.inference_mode():
            return F.linear(hidden, weights.lm_head).float()

    def _attention(self, layer: LayerWeights, index: int, x: Tensor, cos: Tensor, sin: Tensor,
                   segments: list[Segment]) -> Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        qkv = F.linear(x, layer.qkv).view(-1, heads + 2 * kv_heads, self.head_dim)
        # q and k are normalised and rotated together; only their norm weights differ.
        qk = F.rms_norm(qkv[:, : heads + kv_heads], (self.head_dim,), None, self.eps) * layer.qk_norm
        first, second = qk.chunk(2, -1)
        qk = qk * cos + torch.cat((-second, first), -1) * sin
        out = torch.empty(x.shape[0], heads * self.head_dim, dtype=x.dtype)
        row = 0
        for segment in segments:
            n, start = len(segment.tokens), segment.state.length
            cache = segment.state.kv[index]
            cache[0, :, start : start + n] = qk[row : row + n, heads:].transpose(0, 1)
            cache[1, :, start : start + n] = qkv[row : row + n, heads + kv_heads :].transpose(0, 1)
            q = qk[row : row + n, :heads].transpose(0, 1).reshape(kv_heads, heads // kv_heads, n, self.head_dim)
            out[row : row + n] = self._attend(q, cache[:, :, : start + n], start)
            row += n
        return F.linear(out, layer.out)

    def _attend(self, q: Tensor, kv: Tensor, start: int) -> Tensor:
        """q: (kv heads, group, n, head dim); kv: (2, kv heads, start + n, head dim) → (n, heads · head dim)."""
        kv_heads, group, n, dim = q.shape
        if n == 1:
            # One position sees the whole past, so the query heads of a group can stand in for query positions.
            out = F.scaled_dot_product_attention(q.view(1, kv_heads, group, dim), kv[0:1], kv[1:2])
            return out.view(1, kv_heads * group * dim)
        k, v = (t.unsqueeze(1).expand(-1, group, -1, -1) for t in kv)
        mask = None
        if start:
            mask = torch.arange(start + n) <= torch.arange(start, start + n).unsqueeze(1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.permute(2, 0, 1, 3).reshape(n, kv_heads * group * dim)

    def _short_conv(self, layer: LayerWeights, index: int, x: Tensor, segments: list[Segment]) -> Tensor:
        b, c, value = F.linear(x, layer.in_proj, layer.in_proj_bias).chunk(3, -1)
        gated = b * value
        singles = next((i for i, s in enumerate(segments) if len(s.tokens) > 1), len(segments))
        out = torch.empty_like(gated)
        if singles:
            past = torch.stack([s.state.conv[index] for s in segments[:singles]])
            window = torch.cat((past, gated[:singles].unsqueeze(-1)), -1)  # (sequences, hidden, taps)
            out[:singles] = (window * layer.kernel).sum(-1)
            for segment, state in zip(segments[:singles], window[:, :, 1:], strict=True):
                self._keep(segment.state, index, state, segment.state.length + 1)
        row = singles
        for segment in segments[singles:]:
            n, state = len(segment.tokens), segment.state
            window = torch.cat((state.conv[index], gated[row : row + n].T), -1)  # (hidden, taps - 1 + n)
            mixed = F.conv1d(window.unsqueeze(0), layer.kernel.unsqueeze(1), groups=self.hidden)
            out[row : row + n] = mixed[0].T
            first = state.length // self.block * self.block + self.block
            for position in (*range(first, state.length + n, self.block), state.length + n):
                at = position - state.length
                self._keep(state, index, window[:, at : at + self.taps - 1], position)
            row += n
        if layer.conv_bias is not None:
            out = out + layer.conv_bias
        return F.linear(c * out, layer.out, layer.out_bias)

    def _keep(self, state: SequenceState, index: int, conv: Tensor, position: int) -> None:
        if index == 0 and position % self.block == 0:
            state.boundaries[position] = list(state.conv)
        if position % self.block == 0:
            state.boundaries[position][index] = conv
        state.conv[index] = conv
