"""Canary of the weight sync: after a sync, engine and trainer score the same fixed text and must agree.

A sync that silently does not reach the sampler looks like staleness: the ratio drifts, rewards stall, nothing raises.
Two things stop the run here. The mean |difference of log-probs| is beyond what the dtype's rounding explains: the
engine holds other weights. Or the engine's answer has not changed by a bit over STUCK_CHECKS checks while the trainer's
has: with a small learning rate, weights that never arrive stay within the rounding for long, but they stand still.
"""

from __future__ import annotations

from typing import Protocol

import torch

# Mean |difference| in nats. bf16: 0.04 was measured between vLLM and transformers on a random model of 2.6B, and a
# trained one is closer; leaving the adapter out of that model moved it by 0.2. fp32: rounding is below 1e-5.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15}
STUCK_CHECKS = 3
STUCK_MOVE = 1e-3  # nats that the trainer must have moved meanwhile for that to mean anything
TEXT = ("You are in a Linux shell. Read data.csv in the working directory: its header is name,city,amount,date and it "
        "has 1250 rows. Use awk -F, 'NR>1 {s+=$3} END {print s/(NR-1)}' data.csv or Python, find the mean amount of "
        "the rows whose city is Lisbon, round it to two decimals and write only that number to /workdir/answer.txt.")


class CanaryError(RuntimeError):
    """The policy server does not hold the weights that were sent to it."""


class Scorer(Protocol):
    """The policy server's side: recipe.policy_client.PolicyClient."""

    def prompt_logprobs(self, model: str, token_ids: list[int]) -> list[float]: ...


@torch.no_grad()
def trainer_logprobs(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """(len(token_ids) - 1,) log-probs at temperature 1 by the model as it trains, adapter unmerged."""
    training = model.training
    model.eval()
    try:
        ids = torch.tensor([token_ids], device=next(model.parameters()).device)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with torch.compiler.set_stance("force_eager"):  # one more mode would be compiled for a few short forwards
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
    finally:
        model.train(training)


class Canary:
    """Compares engine and trainer on `token_ids` after each `every`-th sync; see the module's docstring."""

    def __init__(self, engine: Scorer, model_name: str, token_ids: list[int], tolerance: float, every: int = 1):
        self.engine, self.model_name, self.token_ids = engine, model_name, token_ids
        self.tolerance, self.every = tolerance, every
        self.syncs = self.unchanged = 0
        self.last: torch.Tensor | None = None  # the engine's answer
        self.anchor: torch.Tensor | None = None  # the trainer's when the engine's answer changed last

    def after_sync(self, model: torch.nn.Module) -> float | None:
        """Mean |difference| in nats, None where no check is due. Raises CanaryError."""
        self.syncs += 1
        if (self.syncs - 1) % self.every:
            return None
        ours = trainer_logprobs(model, self.token_ids)
        theirs = torch.tensor(self.engine.prompt_logprobs(self.model_name, self.token_ids))
        gap = float((ours - theirs).abs().mean())
        figures = (f"mean log-prob of the fixed text {float(theirs.mean()):.6f} in the engine, "
                   f"{float(ours.mean()):.6f} in the trainer, mean |difference| {gap:.2e} nats "
                   f"(allowed {self.tolerance:g})")
        if not gap <= self.tolerance:
            raise CanaryError(
                f"Sync {self.syncs}: the engine does not hold the weights that were sent: {figures}. Likely causes: "
                "the policy server was started for another model, revision or dtype (MODEL, MODEL_REVISION, DTYPE); "
                "another trainer sends to it; it dropped part of the update (logs/policy.log). If only rounding "
                "differs this much, raise CANARY_TOLERANCE.")
        if self.last is None or not torch.equal(theirs, self.last):
            self.last, self.anchor, self.unchanged = theirs, ours, 0
            return gap
        self.unchanged += 1
        moved = float((ours - self.anchor).abs().mean())
        if self.unchanged >= STUCK_CHECKS and moved > STUCK_MOVE:
            raise CanaryError(
                f"Sync {self.syncs}: the engine's answer to a fixed text has not changed by a bit over "
                f"{self.unchanged} syncs, in which the trainer's moved by {moved:.2e} nats: {figures}. Updates are "
                "accepted but do not reach the sampler; see logs/policy.log and restart the policy server.")
        return gap
