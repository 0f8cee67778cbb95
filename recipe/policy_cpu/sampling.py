"""Sampling parameters and one sampling step, with vLLM's meaning: log-probs are *processed* ones.

The log-prob of a token is that of the distribution it was drawn from, after temperature and truncation
(`--logprobs-mode processed_logprobs`): the behaviour policy of the importance ratio. Prompt log-probs are taken at
temperature 1, as vLLM takes them in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # vLLM: a smaller temperature means greedy
LOWEST_TEMPERATURE = 0.01  # vLLM: a smaller one that is not greedy is raised to this
MAX_LOGPROBS = 20  # vLLM's --max-logprobs default
Ranked = dict[int, tuple[float, int]]  # token id → (log-prob, rank from 1); the sampled token first, then the best


@dataclass(frozen=True)
class SamplingParams:
    """What one completion is sampled with. logprobs / prompt_logprobs: how many best tokens, None for none at all."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def generator_for(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed & (2**63 - 1))
    return generator


def processed_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """(vocabulary,) logits in float32 → log-probs of the distribution that `params` samples from."""
    if params.temperature < GREEDY_BELOW:
        return logits.log_softmax(-1)
    logits = logits / max(params.temperature, LOWEST_TEMPERATURE)
    if params.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.max(), -torch.inf)
    if 0 < params.top_k < logits.shape[0]:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ordered, ids = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of the better tokens; 0 for the best
        logits = logits.index_fill(0, ids[before >= params.top_p], -torch.inf)
    return logits.log_softmax(-1)


def draw(logprobs: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Draws a token; the exponential race needs one pass and no sorting."""
    if params.temperature < GREEDY_BELOW:
        return int(logprobs.argmax())
    race = torch.empty_like(logprobs).exponential_(generator=generator)
    return int((logprobs.exp() / race).argmax())


def rank_tokens(logprobs: Tensor, token: int, best: int) -> Ranked:
    """The token's log-prob and rank, then those of the `best` most probable tokens (-1: all)."""
    value = logprobs[token]
    ranked: Ranked = {token: (float(value), int((logprobs > value).sum()) + 1)}
    if best:
        values, ids = logprobs.topk(logprobs.shape[0] if best == -1 else best)
        for rank, (token_id, logprob) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), 1):
            ranked.setdefault(token_id, (logprob, rank))
    return ranked
