"""PREFIX_CACHING=1: what vLLM kept of a conversation gives the same next token as computing it anew, also after a sync.

vLLM computes a whole prompt where its log-probs are asked for, so one server gives both. Right behind a border of what
was kept, a sequence whose convolutions lost their state there is 0.8 and more away; roundings are below 0.02.
"""

from __future__ import annotations

import json
import math
import random
import threading
from typing import Any

import pytest
import requests

from bench.model import TINY
from bench.weight_sync import load_policy, nudge, ours
from recipe.policy_client import PolicyClient
from recipe.weight_sync import transfer_of

BORDER = 128  # a multiple of every block size that vLLM chose so far, in tokens
TOLERANCE = 0.02


def some_ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 1600) for _ in range(count)]


def ask(server: Any, ids: list[int], anew: bool = False) -> tuple[dict[str, float], int]:
    """(probabilities of the likeliest tokens after `ids`, number of tokens whose computation was kept)"""
    found, kept = PolicyClient(server.url).next_token(server.model, ids, anew)
    return {token: math.exp(value) for token, value in found.items()}, kept or 0


def apart(one: dict[str, float], two: dict[str, float]) -> float:
    """Total variation distance of two distributions, from 0 to 1, of the tokens that both list."""
    shared = one.keys() & two.keys()
    assert len(shared) > 10, "they have hardly a token in common"
    return sum(abs(one[token] - two[token]) for token in shared) / 2


def against_whole(server: Any, ids: list[int]) -> tuple[float, int]:
    found, kept = ask(server, ids)
    whole, none = ask(server, ids, anew=True)
    assert none == 0
    return apart(found, whole), kept


class Sampling:
    """A request in flight; `ids` are its prompt and what it sampled by now."""

    def __init__(self, server: Any, prompt: list[int]):
        self.ids, self.prompt, self.count = list(prompt), len(prompt), threading.Condition()
        self.limit = 2500
        self.answer = requests.post(server.url + "/v1/completions", stream=True, timeout=300, json={
            "model": server.model, "prompt": prompt, "max_tokens": self.limit, "ignore_eos": True, "stream": True,
            "temperature": 1.0, "return_token_ids": True})
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self.answer.iter_lines():
            if line.startswith(b"data: {"):
                with self.count:
                    self.ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    self.count.notify_all()

    def until(self, sampled: int) -> int:
        """Waits for so many tokens; the length of `ids` then."""
        with self.count:
            assert self.count.wait_for(lambda: len(self.ids) - self.prompt >= sampled, 120), "it does not go on"
            return len(self.ids)


@pytest.mark.policy("tiny-cached")
@pytest.mark.parametrize("beyond", [-1, 0, 1, 2])
def test_a_kept_prefix_gives_the_next_token_of_a_whole_prompt(server, beyond):
    ids, measured = some_ids(6 * BORDER + beyond, seed=100 + beyond), []
    for turn, more in enumerate((1, 2, 60, 70)):  # a conversation that grows
        ask(server, ids)
        measured.append(against_whole(server, ids))
        ids = ids + some_ids(more, seed=turn)
        measured.append(against_whole(server, ids))
    print(f"{beyond:+d}: distance and tokens kept: {measured}")
    # (of the same prompt once more nothing is, when it ends at a border: the last token is always computed)
    assert all(kept >= 4 * BORDER for _, kept in measured[1::2]), "nothing was kept, so nothing was tested"
    assert max(distance for distance, _ in measured) < TOLERANCE


@pytest.mark.policy("tiny-cached")
def test_a_sync_leaves_nothing_of_the_old_weights(server, tmp_path):
    model = load_policy(TINY)
    transfer = transfer_of(server.url, tmp_path, timeout=45)
    transfer.init_weight_transfer()
    for number in range(2):  # the first runs the engine's loader, the second copies
        prompts = [some_ids(5 * BORDER + 1, seed=10 * number + i) for i in range(4)]
        for ids in prompts:
            ask(server, ids)
        old = [ask(server, ids) for ids in prompts]
        assert all(kept >= 4 * BORDER for _, kept in old)
        flight = Sampling(server, some_ids(3 * BORDER, seed=50 + number))
        before = flight.until(200)
        ours(model, transfer)
        assert len(flight.ids) < flight.prompt + flight.limit, "it ended before the sync"
        new = [ask(server, ids) for ids in prompts]
        assert all(kept == 0 for _, kept in new)
        assert max(apart(a, b) for (a, _), (b, _) in zip(old, new, strict=True)) > 2 * TOLERANCE, "nothing to see"
        flight.thread.join(300)
        assert len(flight.ids) == flight.prompt + flight.limit, "it did not go on"
        cuts = [flight.ids[:cut] for cut in (4 * BORDER + 1, before - 1, before + 1, before + 150, len(flight.ids))]
        distances = [against_whole(server, ids)[0] for ids in prompts + cuts]
        print(f"sync {number}: {distances}")
        assert max(distances) < TOLERANCE
        nudge(model, 0.05)
    transfer.destroy()
