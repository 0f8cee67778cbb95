"""All weights of a model in one flat buffer: what lies where, packing, and views of it.

Trainer and engine move the policy as one piece of memory, not as hundreds of tensors: the time of a sync is work per
tensor, not bytes (two H200s, 272 tensors in bf16: 133 ms, where the wire needs 11).
`Receiver` is the engine's side: the model's own loader runs once, under a recorder that notes which part of the buffer
went where; every later update repeats those copies and nothing else.

Needs torch alone: the policy server's Python imports this file.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALIGN = 256  # bytes: where cudaMalloc would have put each tensor
Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """One tensor's place: `offset` in bytes from the start of the buffer, `dtype` as torch names it ("bfloat16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        part = flat[self.offset:self.offset + self.nbytes]
        return part.view(getattr(torch, self.dtype)).view(self.shape)


def plan(tensors: Iterable[Named]) -> list[Slot]:
    """A slot for each tensor, in order, each aligned to ALIGN bytes."""
    slots, offset = [], 0
    for name, tensor in tensors:
        slots.append(Slot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        offset += -(-slots[-1].nbytes // ALIGN) * ALIGN
    return slots


def size(slots: list[Slot]) -> int:
    """Bytes of the buffer that holds `slots`."""
    return slots[-1].offset + -(-slots[-1].nbytes // ALIGN) * ALIGN


def to_json(slots: list[Slot]) -> list[dict[str, Any]]:
    return [asdict(slot) for slot in slots]


def from_json(slots: list[dict[str, Any]]) -> list[Slot]:
    return [Slot(**{**slot, "shape": tuple(slot["shape"])}) for slot in slots]


@torch.no_grad()
def pack(flat: torch.Tensor, slots: list[Slot], tensors: Iterable[Named]) -> None:
    """Copies each tensor into its slot. Raises ValueError when they are not those of `plan`, in its order."""
    for slot, (name, tensor) in zip(slots, tensors, strict=True):
        view = slot.view(flat)
        if (name, tensor.shape, tensor.dtype) != (slot.name, view.shape, view.dtype):
            raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} came where {slot} was announced")
        view.copy_(tensor)


class CopyRecorder(TorchDispatchMode):
    """Notes (destination, source) of every copy_ that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.pairs.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def missing(flat: torch.Tensor, slots: list[Slot], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    """Names of slots that `pairs` do not copy whole, straight from `flat` to somewhere else."""
    start = flat.data_ptr()
    taken: dict[str, int] = defaultdict(int)
    for destination, source in pairs:
        at = source.data_ptr() - start
        within = 0 <= destination.data_ptr() - start < flat.numel()
        if within or not 0 <= at < flat.numel() or not source.is_contiguous():
            continue
        # at most 272 slots, and this runs once
        slot = max((s for s in slots if s.offset <= at), key=lambda s: s.offset)
        taken[slot.name] += source.numel() * source.element_size()
    return [slot.name for slot in slots if taken[slot.name] != slot.nbytes]


class Receiver:
    """Puts what lies in `flat` into `model`, by `load_weights((name, tensor), ...)` once and by plain copies after.

    `replays` is False where the loader does more than to copy (a transposition into new memory, say); then it runs
    every time. `context()` surrounds the loader.
    """

    def __init__(self, flat: torch.Tensor, slots: list[Slot], load_weights: Callable[[Iterable[Named]], Any],
                 context: Callable[[], AbstractContextManager] = nullcontext):
        self.flat, self.slots, self.load_weights, self.context = flat, slots, load_weights, context
        self.views = [(slot.name, slot.view(flat)) for slot in slots]
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.missing: list[str] = []

    @property
    def replays(self) -> bool:
        return bool(self.pairs)

    @torch.no_grad()
    def apply(self) -> dict[str, Any]:
        """One update; returns seconds, the way it took, and how many copies. The device is done when it returns."""
        started = time.perf_counter()
        if self.pairs:
            torch._foreach_copy_([d for d, _ in self.pairs], [s for _, s in self.pairs])
            copies, way = len(self.pairs), "copies"
        else:
            with self.context(), CopyRecorder() as recorder:
                self.load_weights(iter(self.views))
            copies, way = len(recorder.pairs), "loader"
            if self.pairs is None:
                self.missing = missing(self.flat, self.slots, recorder.pairs)
                self.pairs = [] if self.missing else [
                    (d, s) for d, s in recorder.pairs
                    if 0 <= s.data_ptr() - self.flat.data_ptr() < self.flat.numel()]
        if self.flat.is_cuda:
            torch.cuda.synchronize(self.flat.device)
        return {"seconds": time.perf_counter() - started, "way": way, "copies": copies, "missing": self.missing[:5]}
