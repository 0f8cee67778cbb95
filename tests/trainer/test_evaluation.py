"""Which tasks and cells an evaluation has, what makes a cell stale, and the watcher's order of checkpoints."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

import eval_watch
from recipe import report
from recipe.adapters import AdapterError, LocalCheckpoints, Spec, complete_steps, fetch
from recipe.config import Settings
from recipe.evaluation import EvalTask, make_jobs, stratified


def tasks(n: int, difficulties=("easy", "medium", "hard"), weights=(1, 4, 6)) -> list[EvalTask]:
    rng = random.Random(0)
    return [EvalTask(f"task-{i:04d}", i, rng.choices(difficulties, weights)[0], "", f"digest-{i}") for i in range(n)]


@pytest.mark.parametrize("n", [1, 7, 100, 249, 250])
def test_subset_has_the_shares_of_the_whole_within_one_task(n):
    everything = tasks(250)
    subset = stratified(everything, n)
    assert len(subset) == len(set(subset)) == n
    whole, part = Counter(t.difficulty for t in everything), Counter(t.difficulty for t in subset)
    for difficulty, count in whole.items():
        assert abs(part[difficulty] - count * n / 250) < 1
    assert [t.index for t in subset] == sorted(t.index for t in subset)


def test_subset_does_not_depend_on_the_order_served():
    everything = tasks(250)
    shuffled = random.Random(1).sample(everything, 250)
    assert stratified(everything, 100) == stratified(shuffled, 100)


def test_too_few_tasks_are_named():
    with pytest.raises(ValueError, match="N_TASKS=11, but only 10"):
        stratified(tasks(10), 11)


def make_adapter(folder: Path, weights: bytes = b"w") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def settings(**env: str) -> Settings:
    return Settings.load({"PRESET": "local", "MODEL": "some/model"} | env)


def test_jobs_alternate_and_name_what_decides_a_cell(tmp_path):
    adapter = make_adapter(tmp_path / "a")
    jobs = make_jobs(settings(), tasks(2), adapter, "adapter", "opencode-lora")
    assert [(j.index, j.model, j.served) for j in jobs] == [
        (0, "base", "some/model"), (0, "adapter", "opencode-lora"),
        (1, "base", "some/model"), (1, "adapter", "opencode-lora")]
    base, lora = jobs[0].fingerprint, jobs[1].fingerprint
    assert len({j.fingerprint for j in jobs}) == 4

    def again(s: Settings, folder: Path, served: str = "opencode-lora") -> tuple[str, str]:
        new = make_jobs(s, tasks(2), folder, "adapter", served)
        return new[0].fingerprint, new[1].fingerprint

    assert again(settings(STALL_LIMIT="77", N_TASKS="5"), adapter, "other-name") == (base, lora)
    other = make_adapter(tmp_path / "b", b"other weights")
    assert again(settings(), other)[0] == base and again(settings(), other)[1] != lora
    for change in ({"MAX_OUTPUT_TOKENS": "99"}, {"MODEL": "other/model"}, {"AGENT_TIMEOUT": "1"},
                   {"MAX_MODEL_CALLS": "3"}, {"TEMPERATURE": "0.5"}):
        new = again(settings(**change), adapter)
        assert new[0] != base and new[1] != lora, change


# -- adapters and checkpoints -----------------------------------------------------------------------------------------
def test_hub_specs():
    assert Spec.parse("you/name") == Spec("you/name", "", None)
    assert Spec.parse("you/name/checkpoint-100@1a2b") == Spec("you/name", "checkpoint-100", "1a2b")
    assert Spec.parse("you/na.me@main") == Spec("you/na.me", "", "main")
    for wrong in ("name", "", "you/name@", "/abs/missing", "you//x"):
        with pytest.raises(AdapterError):
            Spec.parse(wrong)


def test_a_folder_without_weights_is_no_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="lacks adapter_model.safetensors"):
        fetch(str(tmp_path), tmp_path)


def test_half_pushed_checkpoints_are_not_seen(tmp_path):
    whole = [f"checkpoint-100/{n}" for n in ("adapter_config.json", "adapter_model.safetensors", "trainer_state.json")]
    half = ["checkpoint-200/adapter_config.json", "checkpoint-200/adapter_model.safetensors"]
    assert complete_steps([*half, *whole, "adapter_model.safetensors", "eval/summary.json"]) == [100]
    for name in whole + half:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert LocalCheckpoints(tmp_path).steps() == [100]
    assert LocalCheckpoints(tmp_path / "absent").steps() == []


class Arriving:
    """Checkpoints of which each look shows more."""

    def __init__(self, *looks: list[int]):
        self.looks = list(looks)

    def steps(self) -> list[int]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def get(self, step: int) -> Path:
        return Path(f"checkpoint-{step}")


@pytest.fixture
def evaluated(monkeypatch) -> list[int]:
    """Replaces the evaluation by one that writes a result at once; lists the evaluated steps."""
    order: list[int] = []

    def evaluate(s, adapter, label, served, out):
        step = int(label.removeprefix("checkpoint-"))
        assert str(adapter) == label and served == f"opencode-lora-{step}"
        order.append(step)
        cell = {"task": "t", "tool_calls": 1, "tokens": 5}
        result = report.compare([cell | {"status": "wrong"}],
                                [cell | {"status": "ungraded" if step == 30 else "correct"}]) | {"tasks": 1}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result))

    monkeypatch.setattr(eval_watch, "evaluate", evaluate)
    monkeypatch.setattr(eval_watch.time, "sleep", lambda seconds: None)
    return order


def test_newest_first_none_skipped_and_the_last_one_ends(tmp_path, evaluated):
    s = settings(RUN_DIR=str(tmp_path), MAX_STEPS="50")
    source = Arriving([], [10], [10], [10, 20, 30, 40], [10, 20, 30, 40], [10, 20, 30, 40, 50])
    assert eval_watch.watch(s, source) == 1  # the ungraded cell of checkpoint-30
    assert evaluated == [10, 40, 30, 50, 20]
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert [p["step"] for p in summary["checkpoints"]] == [10, 20, 30, 40, 50]
    assert summary["checkpoints"][0]["adapter"]["pass_at_1"] == 1.0
    assert "checkpoint-30" in eval_watch.render(summary)


def test_a_restart_goes_on_and_the_idle_limit_ends(tmp_path, evaluated, monkeypatch):
    s = settings(RUN_DIR=str(tmp_path), MAX_STEPS="50", EVAL_IDLE_LIMIT="3")
    clock = iter(range(0, 1000))
    monkeypatch.setattr(eval_watch.time, "monotonic", lambda: next(clock))
    eval_watch.watch(s, Arriving([10, 20]))
    eval_watch.watch(s, Arriving([10, 20, 30]))
    assert evaluated == [20, 10, 30]
