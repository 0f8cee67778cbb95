"""Start-up check on the model that is about to be trained, LFM2 or not: two packed sequences give what they give alone.

Three figures, so that the check means the same in every dtype:
  influence   the second sequence's log-probs when the first one's tokens are others, at the same lengths: kernels and
              shapes are equal, so an isolated model changes nothing at all, however coarse its dtype
  log_probs   packed against separate, the largest difference; rounding differs, so bf16 gets more room
  gradients   of the trainable parameters (adapter, or all), packed against the sum of the separate ones, relative
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

LENGTHS = (23, 18)  # longer than any short convolution reaches, short enough to cost nothing on a large model
INFLUENCE = 1e-6  # nats; the leak of an untouched LFM2 is 1e-4 and more
# (largest log-prob difference in nats, relative gradient difference) that rounding alone may cause
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.5, 0.1), torch.float16: (0.1, 0.05)}


class LeakError(RuntimeError):
    """Sequences packed into one row see each other: nothing trained on such rows is right."""


@dataclass(frozen=True)
class Isolation:
    """What the check measured; see the module's docstring."""

    influence: float
    log_probs: float
    gradients: float
    dtype: torch.dtype

    def __str__(self) -> str:
        return (f"packed sequences: influence on each other {self.influence:.1e} nats; against separate ones, "
                f"log-probs within {self.log_probs:.1e} nats, gradients within {self.gradients:.1e}")

    def require(self) -> None:
        """Raises LeakError when a figure is beyond what rounding explains."""
        log_probs, gradients = TOLERANCES[self.dtype]
        limits = [("influence", self.influence, INFLUENCE), ("log-probs", self.log_probs, log_probs),
                  ("gradients", self.gradients, gradients)]
        broken = [f"{name} {value:.2e} (allowed {limit:.0e})" for name, value, limit in limits if not value <= limit]
        if broken:
            raise LeakError(f"Sequences of a packed row are not kept apart: {', '.join(broken)} in {self.dtype}. "
                            "Choose another ATTENTION backend. If all of them fail, the model mixes tokens in another "
                            "way too: TOKEN_BUDGET=0 and PER_DEVICE_BATCH=1 put one sequence in a row; for LFM2 "
                            "recipe/short_conv.py keeps them apart, see whether it matches the installed transformers.")


def measure(model: torch.nn.Module, seed: int = 0, dtype: torch.dtype | None = None) -> Isolation:
    """Runs the check on `model` as it stands, without dropout; its gradients and its mode are left as they were.

    `dtype` is what it computes in, where that is not the dtype of its weights (autocast).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    device, vocabulary = parameters[0].device, model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(seed)
    first, second, other = (torch.randint(vocabulary, (1, n), generator=generator).to(device)
                            for n in (*LENGTHS, LENGTHS[0]))
    kept, training = [p.grad for p in parameters], model.training
    if any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules()):
        model.eval()

    def score(*sequences: torch.Tensor, backward: bool = False) -> torch.Tensor:
        """Log-probs (of each sequence's tokens but its first) of one packed row."""
        ids = torch.cat(sequences, dim=1)
        positions = torch.cat([torch.arange(s.shape[1], device=device) for s in sequences])[None]
        with torch.set_grad_enabled(backward):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
            log_probs = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            log_probs = log_probs[positions[0, 1:] > 0]
            if backward:
                log_probs.sum().backward()
        return log_probs.detach()

    def taken() -> list[torch.Tensor]:
        """The gradients, which the parameters give up: a copy would be as large as the model where all is trained."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        model.zero_grad(set_to_none=True)
        return found

    try:
        model.zero_grad(set_to_none=True)
        packed = score(first, second, backward=True)
        packed_gradients = taken()
        alone = torch.cat([score(first, backward=True), score(second, backward=True)])
        alone_gradients = taken()
        tail = LENGTHS[1] - 1
        influence = score(other, second)[-tail:] - score(first, second)[-tail:]
    finally:
        model.train(training)
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
    return Isolation(
        influence=float(influence.abs().max()), log_probs=float((packed - alone).abs().max()),
        gradients=_norm(a - b for a, b in zip(packed_gradients, alone_gradients, strict=True)) / max(
            _norm(alone_gradients), 1e-20),
        dtype=dtype or model.get_input_embeddings().weight.dtype)


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    """Of all of them as one vector, one after the other."""
    return math.hypot(*(float(t.float().norm()) for t in tensors))


class IsolationCallback(TrainerCallback):
    """Measures the model when training begins, before the first rollout: as loaded, prepared and resumed."""

    def __init__(self, dtype: torch.dtype | None = None):
        self.dtype = dtype  # that the model computes in

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module | None = None, **_: Any
                       ) -> None:
        found = measure(model, dtype=self.dtype)
        print(found, flush=True)
        found.require()
