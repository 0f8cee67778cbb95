"""Canary of the weight sync: after a sync, engine and trainer score the same fixed text and must agree.

A sync that silently does not reach the sampler looks like staleness: the ratio drifts, rewards stall, nothing raises.
Two things stop the run here. The mean |difference of log-probs| is beyond what the dtype's rounding explains: the
engine holds other weights. Or the engine's answer has not changed by a bit over STUCK_CHECKS checks while the trainer's
has: with a small learning rate, weights that never arrive stay within the rounding for long, but they stand still.

With PREFIX_CACHING=1 two more do: the engine answers from tokens that it computed before the sync, which the text's
log-probs cannot show, because for them vLLM computes every token; or from what it keeps it takes another next token.
(The former shows as long as the engine has not evicted the prompt since the check before.)
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

# Mean |difference| in nats. bf16: 0.04 was measured between vLLM and transformers on a random model of 2.6B, and a
# trained one is closer; leaving the adapter out of that model moved it by 0.2. fp32: rounding is below 1e-5.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15}
STUCK_CHECKS = 3
STUCK_MOVE = 1e-3  # nats that the trainer must have moved meanwhile for that to mean anything
# Tokens of the prompts that are asked for twice: one behind a border of blocks of 16 to 128 tokens, where convolutions
# whose state is lost moved a probability of the tiny model by 0.8 in two of the three prompts. Rounding moved none by
# 1e-4 (vLLM 0.26.0 on a CPU); where it is larger, most prompts are still within the tolerance.
KEPT_LENGTH, KEPT_TOLERANCE, KEPT_PROMPTS = 385, 0.1, 3
TEXT = ("You are in a Linux shell. Read data.csv in the working directory: its header is name,city,amount,date and it "
        "has 1250 rows. Use awk -F, 'NR>1 {s+=$3} END {print s/(NR-1)}' data.csv or Python, find the mean amount of "
        "the rows whose city is Lisbon, round it to two decimals and write only that number to /workdir/answer.txt.")


class CanaryError(RuntimeError):
    """The policy server does not hold the weights that were sent to it."""


class Scorer(Protocol):
    """The policy server's side: recipe.policy_client.PolicyClient."""

    def prompt_logprobs(self, model: str, token_ids: list[int]) -> list[float]: ...

    def next_token(self, model: str, token_ids: list[int]) -> tuple[dict[str, float], int | None]: ...


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


def kept_prompt(token_ids: list[int], number: int = 0) -> list[int]:
    """KEPT_LENGTH of `token_ids` in disorder: after a text that makes sense the next token is too certain to move."""
    return [token_ids[(7 * i * i + 3 * i + number) % len(token_ids)] for i in range(KEPT_LENGTH)]


def largest_move(one: dict[str, float], two: dict[str, float]) -> float:
    """The largest difference of a probability between two lists of the likeliest tokens' log-probs. A token that is not
    listed has at most the probability of the last one that is."""
    least = min(one.values()), min(two.values())
    return max(abs(math.exp(one.get(token, least[0])) - math.exp(two.get(token, least[1]))) for token in one | two)


class Canary:
    """Compares engine and trainer on `token_ids` after each `every`-th sync; see the module's docstring. `caching`: the
    engine keeps prefixes."""

    WITHOUT = "Set PREFIX_CACHING=0, which this vLLM needs, and start the same command again."

    def __init__(self, engine: Scorer, model_name: str, token_ids: list[int], tolerance: float, every: int = 1,
                 caching: bool = False):
        self.engine, self.model_name, self.token_ids = engine, model_name, token_ids
        self.tolerance, self.every, self.caching = tolerance, every, caching
        self.syncs = self.unchanged = 0
        self.last: torch.Tensor | None = None  # the engine's answer
        self.anchor: torch.Tensor | None = None  # the trainer's when the engine's answer changed last

    def after_sync(self, model: torch.nn.Module) -> float | None:
        """Mean |difference| in nats, None where no check is due. Raises CanaryError."""
        self.syncs += 1
        if (self.syncs - 1) % self.every:
            return None
        if self.caching:
            self._look_at_what_is_kept()
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

    def _look_at_what_is_kept(self) -> None:
        """Nobody but this check asks for its prompts. Raises CanaryError."""
        beyond: list[float] = []
        for number in range(KEPT_PROMPTS):
            ids = kept_prompt(self.token_ids, number)
            anew, stale = self.engine.next_token(self.model_name, ids)
            again, kept = self.engine.next_token(self.model_name, ids)
            if stale:
                raise CanaryError(f"Sync {self.syncs}: the engine still answers from {stale} tokens that it computed "
                                  f"with earlier weights. {self.WITHOUT}")
            if not kept and self.syncs == 1:
                print("PREFIX_CACHING=1, but the policy server " + (
                    f"kept nothing of a prompt of {len(ids)} tokens: its blocks are larger, or it keeps no prefixes."
                    if kept == 0 else "does not tell what it took from its cache: what is left of earlier weights "
                    "there goes unnoticed. Serve it with --enable-prompt-tokens-details, as serve_policy.sh does."),
                    flush=True)
            move = largest_move(anew, again)
            if move > KEPT_TOLERANCE:
                beyond.append(move)
            if not beyond:
                return
        if len(beyond) > KEPT_PROMPTS // 2:  # one alone may be rounding
            raise CanaryError(f"Sync {self.syncs}: of {kept} tokens that it keeps, the engine takes another next token "
                              f"than of the same computed anew: a probability moves by {max(beyond):.2g} (allowed "
                              f"{KEPT_TOLERANCE:g}). {self.WITHOUT}")
