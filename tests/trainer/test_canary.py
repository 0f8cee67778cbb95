"""The sync canary: silent while engine and trainer agree, loud when an update did not arrive."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from lfm2_small import local_settings, small_model
from small_engine import SmallEngine, SmallSessions

import train_lora
from recipe.canary import STUCK_CHECKS, Canary, CanaryError, trainer_logprobs
from recipe.config import Settings
from recipe.policy_client import PolicyClient

REPO = Path(__file__).parents[2]
TEXT = [1, 6, 20, 33, 9, 48, 12, 7]


class Engine:
    """Answers with what `model` scores, plus `error`."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.error, self.asked = model, 0.0, 0

    def prompt_logprobs(self, model: str, token_ids: list[int]) -> list[float]:
        assert model == "policy"
        self.asked += 1
        return (trainer_logprobs(self.model, token_ids) + self.error).tolist()


def move(model: torch.nn.Module, scale: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=scale)


def test_agreement_is_silent_and_measured():
    model = small_model().train()
    canary = Canary(Engine(model), "policy", TEXT, tolerance=1e-3)
    for _ in range(STUCK_CHECKS + 3):
        move(model, 1e-2)
        assert canary.after_sync(model) == 0
    assert model.training, "the trainer's mode is left as it was"


def test_other_weights_stop_the_run_with_both_figures():
    model, engine = small_model(), Engine(small_model())
    canary = Canary(engine, "policy", TEXT, tolerance=1e-3)
    assert canary.after_sync(model) == 0
    move(model, 1e-2)  # the sync did not reach the engine
    ours, theirs = (float(trainer_logprobs(m, TEXT).mean()) for m in (model, engine.model))
    with pytest.raises(CanaryError, match=rf"Sync 2: .*{theirs:.6f} in the engine, {ours:.6f} in the trainer.*0.001"):
        canary.after_sync(model)
    with pytest.raises(CanaryError, match="does not hold"):
        engine.error = float("nan")
        canary.after_sync(model)


def test_an_engine_that_stands_still_is_noticed_within_the_tolerance():
    model, engine = small_model(), Engine(small_model())
    canary = Canary(engine, "policy", TEXT, tolerance=10.0)  # rounding explains anything
    canary.after_sync(model)
    for _ in range(STUCK_CHECKS - 1):
        move(model, 1e-2)
        canary.after_sync(model)
    move(model, 1e-2)
    with pytest.raises(CanaryError, match=rf"has not changed by a bit over {STUCK_CHECKS} syncs.*do not reach"):
        canary.after_sync(model)


def test_steps_without_gradient_are_no_alarm():
    model = small_model()
    canary = Canary(Engine(small_model()), "policy", TEXT, tolerance=1e-3)
    for _ in range(STUCK_CHECKS + 3):
        canary.after_sync(model)  # neither moves


def test_not_every_sync_needs_a_check():
    model = small_model()
    engine = Engine(model)
    canary = Canary(engine, "policy", TEXT, tolerance=1e-3, every=3)
    assert [canary.after_sync(model) for _ in range(7)] == [0, None, None, 0, None, None, 0] and engine.asked == 3


class Keeping(Engine):
    """Keeps prefixes: `drops` them at a sync or not, and takes `lost` convolutions for them or not."""

    def __init__(self, model, drops=True, lost=0, tells=True, keeps=True):
        super().__init__(model)
        self.drops, self.lost, self.tells, self.keeps, self.known = drops, lost, tells, keeps, {}

    def next_token(self, model: str, token_ids: list[int]) -> tuple[dict[str, float], int | None]:
        kept = (len(token_ids) - 1) // 16 * 16 if self.keeps and tuple(token_ids) in self.known else 0
        number = self.known.setdefault(tuple(token_ids), len(self.known))
        top = {"token_id:7": -2.0 if kept and number < self.lost else -0.2, "token_id:9": -2.0}
        return top, kept if self.tells else None


def syncs(engine: Keeping, count: int) -> None:
    canary = Canary(engine, "policy", TEXT, tolerance=1e-3, caching=True)
    for _ in range(count):
        if engine.drops:
            engine.known.clear()
        canary.after_sync(engine.model)


def test_prefixes_that_are_dropped_at_each_sync_are_silent(capsys):
    syncs(Keeping(small_model()), 4)
    assert capsys.readouterr().out == ""
    syncs(Keeping(small_model(), tells=False), 4)
    assert capsys.readouterr().out.count("--enable-prompt-tokens-details") == 1
    syncs(Keeping(small_model(), keeps=False), 4)
    assert capsys.readouterr().out.count("kept nothing of a prompt of 385 tokens") == 1


def test_prefixes_of_earlier_weights_stop_the_run():
    syncs(Keeping(small_model(), drops=False), 1)
    with pytest.raises(CanaryError, match="Sync 2: the engine still answers from 384 tokens.*PREFIX_CACHING=0"):
        syncs(Keeping(small_model(), drops=False), 2)


def test_a_kept_prefix_that_gives_another_token_stops_the_run():
    with pytest.raises(CanaryError, match=r"Sync 1: of 384 tokens that it keeps.*moves by 0.68 .*PREFIX_CACHING=0"):
        syncs(Keeping(small_model(), lost=2), 1)
    syncs(Keeping(small_model(), lost=1), 1)  # one prompt of three


def test_policy_client_scores_what_the_engine_holds():
    with SmallEngine(small_model()) as engine:
        scores = PolicyClient(engine.url).prompt_logprobs("policy", TEXT)
    assert torch.allclose(torch.tensor(scores), trainer_logprobs(small_model(), TEXT), atol=1e-6)


@pytest.mark.parametrize("deaf", [False, True])
def test_training_with_an_engine_that_ignores_updates(tmp_path, monkeypatch, trl_globals, deaf):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO / "tests/trainer"), os.environ.get("PYTHONPATH", "")]))
    settings = local_settings(tmp_path)
    with SmallEngine(small_model()) as engine:
        if deaf:
            engine.model.load_state_dict = lambda *_, **__: None
        settings = dataclasses.replace(settings, policy_port=engine.server.server_port)
        sessions = SmallSessions(engine.url, tasks=3, fates={}, log=tmp_path / "sessions")
        if deaf:
            with pytest.raises(CanaryError, match="does not hold the weights"):
                train_lora.train(settings, "auto", sessions)
            return
        assert train_lora.train(settings, "auto", sessions) == 0
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3 and all(step["trl"]["sync/canary_gap"] < 1e-5 for step in steps)


def test_settings():
    assert Settings.load({}).canary_every == 1 and Settings.load({"CANARY_TOLERANCE": "0.3"}).canary_tolerance == 0.3
