"""Blocks of computed prompt that later requests can start from: attention keys and values *and* short-conv state.

A hybrid model can only continue from a position whose conv state is known, so both are kept at the same block
boundaries (what vLLM calls mamba cache mode "align"). A block is found by the chain of all tokens before it and by
the weights that computed it: `root` differs for every weight version and adapter, so a block can never serve
another policy's request.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recipe.policy_cpu.model import SequenceState


@dataclass(frozen=True, eq=False)
class Block:
    """kv: (attention layers, 2, kv heads, block, head dim); conv: the conv states after the block's last token."""

    kv: Tensor
    conv: list[Tensor]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + sum(state.nbytes for state in self.conv)


class PrefixCache:
    """Least recently used blocks up to `max_bytes`; 0 switches the cache off."""

    def __init__(self, block: int = 64, max_bytes: int = 256 * 2**20) -> None:
        self.block, self.max_bytes = block, max_bytes
        self.bytes = self.hit_tokens = 0
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        self._blocks.clear()
        self.bytes = 0

    def child(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The key of the block with these tokens after the chain `parent` (a root or another block's key)."""
        return hashlib.sha256(parent + np.asarray(tokens, dtype=np.int64).tobytes()).digest()

    def restore(self, root: bytes, tokens: Sequence[int], state: SequenceState) -> bytes:
        """Fills an empty state with the longest known prefix of `tokens`; returns the key of its last block.

        At least one token is left to compute, because its logits are what the caller wants.
        """
        key, found, keys = root, [], []
        for end in range(self.block, len(tokens), self.block):
            following = self.child(key, tokens[end - self.block : end])
            block = self._blocks.get(following)
            if block is None:
                break
            key = following
            found.append(block)
            keys.append(key)
        for known in reversed(keys):  # the beginning of a chain is the last to be evicted
            self._blocks.move_to_end(known)
        if found:
            length = len(found) * self.block
            state.reserve(length)
            torch.cat([block.kv for block in found], dim=3, out=state.kv[:, :, :, :length])
            state.conv, state.length = list(found[-1].conv), length
            self.hit_tokens += length
        return key

    def store(self, parent: bytes, tokens: Sequence[int], state: SequenceState, end: int) -> bytes:
        """Keeps the block that ends at position `end` of the state; returns its key."""
        key = self.child(parent, tokens)
        conv = state.boundaries.pop(end)
        if self.max_bytes and key not in self._blocks:
            block = Block(state.kv[:, :, :, end - self.block : end].clone(), [past.clone() for past in conv])
            self._blocks[key] = block
            self.bytes += block.nbytes
            while self.bytes > self.max_bytes:
                self.bytes -= self._blocks.popitem(last=False)[1].nbytes
        return key
