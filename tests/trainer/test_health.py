"""Figures and alarms of the policy gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from recipe import callbacks, json_lines
from recipe.callbacks import MetricsCallback
from recipe.health import (
    RATIO_STEPS,
    OversizeAlarm,
    RatioAlarm,
    RatioOutside,
    RowHealth,
    has_contrast,
    step_health,
    token_mean,
)


def row(rollout: int = 0, trained: int = 10, ratio: float = 1.0, staleness: int = 0, tokens: int = 50,
        reward: float = 1.0, **more) -> RowHealth:
    return RowHealth(group=3, rollout=rollout, tokens=tokens, trained=trained, tool_calls=2, reward=reward,
                     advantage=0.5, staleness=staleness, fresh=staleness == 0, sampled=4, ratio=ratio,
                     **{**dict(ratio_min=ratio, ratio_max=ratio, clipped=0.0, kl=0.1, entropy=2.0), **more})


def test_means_are_over_tokens():
    assert token_mean([row(trained=30, ratio=1.0), row(trained=10, ratio=2.0)]) == 1.25
    assert token_mean([row(trained=3, kl=0.4), row(trained=1, kl=0.0)], "kl") == pytest.approx(0.3)


def test_health_of_a_step():
    forked = dict(fork=1, realign=2, drift_tokens=9)
    found = step_health([row(0, ratio=1.0, **forked), row(0, ratio=1.0, reward=1.0, **forked),
                         row(1, ratio=3.0, staleness=2, clipped=1.0), row(2, ratio=1.0, staleness=2, reward=0.0)])
    assert (found["forks"], found["realigned"], found["drift_tokens"]) == (1, 2, 9), "counted once a rollout"
    assert (found["forks"], found["ungraded_rollouts"], found["contrast"]) == (1, 1, True)
    assert (found["fresh_rows"], found["fresh_ratio_mean"]) == (2, 1.0)
    assert found["ratio_mean"] == 1.5 and found["ratio_max"] == 3.0 and found["clipped"] == 0.25
    assert found["by_staleness"] == {
        "0": {"rows": 2, "ratio_mean": 1.0, "ratio_min": 1.0, "ratio_max": 1.0, "clipped": 0.0},
        "2": {"rows": 2, "ratio_mean": 2.0, "ratio_min": 1.0, "ratio_max": 3.0, "clipped": 0.5}}
    assert step_health([row(staleness=1)])["fresh_ratio_mean"] is None


def test_contrast_ignores_rounding():
    assert not has_contrast([1.1, 1.1 + 1e-9]) and has_contrast([1.05, 1.1])


def test_ratio_alarm_after_three_steps_running():
    alarm = RatioAlarm()
    assert [alarm.feed(x) for x in (1.003, 1.003, 1.0, 1.01, None, 0.99)] == [None] * 6
    message = alarm.feed(1.005)
    assert message.startswith("RATIO ALARM") and "for 3 steps running (last: 1.01000, 0.99000, 1.00500)" in message
    for cause in ("TOP_P", "weight update", "chat template", "packed", "DTYPE"):
        assert cause in message
    assert "4 steps running" in alarm.feed(0.9)
    assert alarm.feed(1.0) is None and alarm.feed(0.9) is None
    assert RatioAlarm().feed(float("nan")) is None
    broken = RatioAlarm()
    assert [broken.feed(float("nan")) is None for _ in range(RATIO_STEPS)] == [True, True, False]


def test_rows_beyond_the_budget_are_named_and_alarm_above_one_percent():
    alarm = OversizeAlarm(40)
    lines = alarm.feed([row(tokens=40)] * 99 + [row(2, tokens=41)])
    assert len(lines) == 1 and "41 tokens of rollout 2, group 3" in lines[0], "1% exactly is no alarm"
    named, raised = alarm.feed([row(1, tokens=90)])
    assert "90 tokens" in named and raised.startswith("OVERSIZE ALARM: 2 of 101 sequences")
    assert len(alarm.feed([row(tokens=90)])) == 1, "the alarm is raised once"
    assert OversizeAlarm(0).feed([row(tokens=10**6)]) == []


def test_a_solution_that_took_too_many_calls_counts_as_correct(tmp_path):
    """RECIPE=deepcoder takes 0.03 a call beyond 20; the other recipe's rewards of correct answers begin at 1."""
    found = {}
    for recipe in ("deepcoder", "smoldataenvs"):
        metrics = MetricsCallback(tmp_path / "metrics.jsonl", recipe=recipe)
        group = [row(i, reward=reward) for i, reward in enumerate((1.0, 0.97, 0.5, 0.0, -0.1, -0.5))]
        metrics.trainer = SimpleNamespace(group_health=group, _rollout_dataset=SimpleNamespace(skipped={}))
        metrics.durations.append(1.0)
        found[recipe] = metrics.record(1, 2, {})["correct"]
    assert found == {"deepcoder": 3, "smoldataenvs": 1}


def test_conversations_reach_trackio_without_secrets(tmp_path, monkeypatch):
    said = [{"role": "assistant", "content": f"It is {'hf_' + 'a1' * 12}.", "tool_calls": [{"id": 1}]}]
    group = [RolloutSample([{"role": "user", "content": "Say it."}], said, [1], [1], [0.0], 0.5, 1, 2, {"reward": 1.0})]
    sent = []
    monkeypatch.setattr(callbacks, "log_rollout_traces", lambda samples, *_, **__: sent.extend(samples))
    metrics = MetricsCallback(tmp_path / "metrics.jsonl")
    metrics.trainer = SimpleNamespace(group_health=[row()],
                                      _rollout_dataset=SimpleNamespace(skipped={}, last_group=group))
    metrics.on_log(SimpleNamespace(report_to=["trackio"], num_generations=1), SimpleNamespace(
        global_step=1, max_steps=9), None, logs={"loss": 0.1})
    (sample,) = sent
    assert sample.completion == [said[0] | {"content": "It is [Hugging Face token removed]."}]
    assert (sample.prompt, sample.metrics) == (group[0].prompt, group[0].metrics)


@pytest.mark.parametrize("stop", [False, True])
def test_alarms_reach_console_and_metrics(tmp_path, capsys, stop):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rewa')  # torn by a kill
    metrics = MetricsCallback(tmp_path / "metrics.jsonl", token_budget=40, ratio_stop=stop)
    metrics.trainer = SimpleNamespace(group_health=[row(ratio=1.01), row(1, ratio=1.01, reward=0.0)],
                                      _rollout_dataset=SimpleNamespace(skipped={"no contrast": 2}))
    for step in range(2, 2 + RATIO_STEPS):
        state = SimpleNamespace(global_step=step, max_steps=9)
        if stop and step == 1 + RATIO_STEPS:
            with pytest.raises(RatioOutside, match="3 steps running"):
                metrics.on_log(None, state, None, logs={"loss": 0.1})
        else:
            metrics.on_log(None, state, None, logs={"loss": 0.1})
    steps = json_lines.read(tmp_path / "metrics.jsonl")
    assert len(steps) == RATIO_STEPS, "the step that stops the run is recorded"
    assert [any("RATIO ALARM" in note for note in s["notes"]) for s in steps] == [False, False, True]
    assert steps[-1]["oversize_rows"] == 6 and steps[0]["notes"][-1].startswith("OVERSIZE ALARM: 2 of 2")
    assert steps[0]["kl"] == 0.1 and steps[0]["entropy"] == 2.0 and steps[0]["by_staleness"]["0"]["rows"] == 2
    out = capsys.readouterr().out
    assert "RATIO ALARM" in out and "OVERSIZE ALARM" in out and "skipped 2" in out
    assert metrics.summary()["oversize_rows"] == 6 and metrics.summary()["groups_without_contrast"] == 0
