"""Which tasks and cells an evaluation has, what makes a cell stale, and the watcher's order of checkpoints."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import eval_watch
from recipe import checkpoints, evaluation, protocol, report
from recipe.adapters import FINAL, Adapter, AdapterError, LocalCheckpoints, Spec, adapter_digest, fetch
from recipe.cells import MadeWith
from recipe.config import REPO, Settings
from recipe.evaluation import EvalTask, make_jobs, stratified, why_again
from recipe.hub import HubError
from recipe.policy_client import PolicyError
from recipe.protocol import Protocols, describe
from recipe.results_repo import ResultsRepo


def tasks(n: int, difficulties=("easy", "medium", "hard"), weights=(1, 4, 6), kinds: int = 0) -> list[EvalTask]:
    rng = random.Random(0)
    return [EvalTask(f"task-{i:04d}", i, rng.choices(difficulties, weights)[0],
                     f"kind-{rng.randrange(kinds)}" if kinds else "", f"digest-{i}") for i in range(n)]


def pinned_tasks() -> list[EvalTask]:
    """The recipe's own held-out list."""
    rows = json.loads((REPO / "data/test.json").read_text())["tasks"]
    return [EvalTask(row["name"], i, row["difficulty"], "", row["sha256"]) for i, row in enumerate(rows)]


@pytest.mark.parametrize("everything", [pinned_tasks(), tasks(250), tasks(250, kinds=40)],
                         ids=["pinned", "made", "kinds"])
@pytest.mark.parametrize("n", [1, 7, 100, 249, 250])
def test_subset_has_the_shares_of_the_whole_within_one_task(everything, n):
    subset = stratified(everything, n)
    assert len(subset) == len(set(subset)) == n
    whole, part = Counter(t.difficulty for t in everything), Counter(t.difficulty for t in subset)
    for difficulty, count in whole.items():
        assert abs(part[difficulty] - count * n / 250) < 1
        kinds = Counter(t.kind for t in everything if t.difficulty == difficulty)
        chosen = Counter(t.kind for t in subset if t.difficulty == difficulty)
        assert all(abs(chosen[k] - c * part[difficulty] / count) < 1 for k, c in kinds.items())
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


def test_jobs_alternate_and_name_what_decides_a_cell():
    jobs = make_jobs(tasks(2), 2, "p", "a", "adapter", "some/model", "opencode-lora")
    assert [(j.sample, j.index, j.model, j.served) for j in jobs] == [
        (sample, index, model, served) for sample in (0, 1) for index in (0, 1)
        for model, served in (("base", "some/model"), ("adapter", "opencode-lora"))]
    assert [tuple(j.made_with) for j in jobs[:3]] == [("p", "digest-0", ""), ("p", "digest-0", "a"),
                                                      ("p", "digest-1", "")]


def test_the_protocol_names_what_decides_a_cell_and_only_that():
    class Client:
        version = staticmethod(lambda: "0.31.0")

    def of(**env: str) -> dict:
        return describe(settings(MODEL=str(REPO / "tiny/model")) if not env else settings(
            **{"MODEL": str(REPO / "tiny/model")} | env), Client)

    base = of()
    assert base.keys() >= {"model", "model_revision", "chat_template", "engine", "code", "temperature", "top_p",
                           "max_output_tokens", "max_model_calls", "agent_timeout", "opencode_version"}
    assert of(STALL_LIMIT="77", N_TASKS="5", EVAL_CONCURRENCY="1", SEED="4") == base
    for change in ({"MAX_OUTPUT_TOKENS": "99"}, {"AGENT_TIMEOUT": "1"}, {"MAX_MODEL_CALLS": "3"},
                   {"TEMPERATURE": "0.5"}, {"THINKING": "closed"}, {"DTYPE": "bfloat16"}):
        assert of(**change) != base, change


def test_another_model_or_template_is_another_protocol(tmp_path):
    class Client:
        version = staticmethod(lambda: "0.31.0")

    shutil.copytree(REPO / "tiny/model", tmp_path / "model")
    same = describe(settings(MODEL=str(REPO / "tiny/model")), Client)
    assert describe(settings(MODEL=str(tmp_path / "model")), Client) == same, "the place of a model decides nothing"
    shutil.copytree(tmp_path / "model", tmp_path / "other/model")
    template = tmp_path / "other/model/chat_template.jinja"
    template.write_text(template.read_text() + "{# #}")
    other = describe(settings(MODEL=str(tmp_path / "other/model")), Client)
    assert {k for k in same if same[k] != other[k]} == {"chat_template", "model_revision"}


def test_a_task_is_another_one_when_any_of_its_files_is(tmp_path):
    for path in ("task.toml", "environment/data.csv", "tests/data.csv"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    ref, seen = SimpleNamespace(task_name="a/b", index=0), set()
    for path in ("tests/data.csv", "environment/data.csv", "tests/data.csv"):
        seen.add(evaluation._task(tmp_path, ref).digest)
        with (tmp_path / path).open("a") as file:
            file.write("1")
    (tmp_path / "environment/data.csv").rename(tmp_path / "environment/other.csv")
    assert len(seen | {evaluation._task(tmp_path, ref).digest}) == 4


def test_every_pattern_of_the_code_version_names_files():
    assert all([*REPO.glob(pattern)] for pattern in protocol.CODE)


def test_why_cells_are_run_again_is_said(tmp_path):
    protocols = Protocols(tmp_path / "protocols.json")
    old = protocols.add({"max_output_tokens": 256, "engine": "0.31.0", "thinking": "closed"})
    new = Protocols(tmp_path / "protocols.json").add({"max_output_tokens": 4096, "engine": "0.31.0",
                                                      "thinking": "closed"})
    jobs = make_jobs(tasks(4), 1, new, "a", "adapter", "m", "o")
    stale = {jobs[0]: MadeWith(old, "digest-0"), jobs[1]: MadeWith(new, "digest-0", "b"),
             jobs[2]: MadeWith(new, "other"), jobs[4]: MadeWith(old, "digest-2"), jobs[6]: MadeWith("gone", "x")}
    assert why_again(stale, Protocols(tmp_path / "protocols.json")) == [
        "2 earlier cells are run again: max_output_tokens was 256, is 4096",
        "1 earlier cells are run again: the adapter's weights are other ones",
        "1 earlier cells are run again: their tasks' files have changed",
        "1 earlier cells are run again: protocol gone is not in protocols.json"]


def test_other_weights_are_never_served_under_a_name_that_was_used(tmp_path, monkeypatch):
    names = []

    class Engine:
        def __init__(self, url): ...

        def load_adapter(self, name, folder):
            names.append(name)
            raise PolicyError("seen enough")

    monkeypatch.setattr(evaluation, "PolicyClient", Engine)
    monkeypatch.setattr(evaluation, "held_out_tasks", lambda settings: tasks(2))
    for folder, weights in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        adapter = Adapter(make_adapter(tmp_path / folder, weights), "a folder")
        with pytest.raises(PolicyError):
            evaluation.evaluate(settings(RUN_DIR=str(tmp_path)), evaluation.Plan(adapter, "adapter", "tuned", tmp_path))
    assert names[0] == names[2] != names[1] and all(name.startswith("tuned-") for name in names)


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


def make_checkpoint(root: Path, step: int, weights: bytes = b"w") -> Path:
    folder = make_adapter(root / f"checkpoint-{step}", weights)
    (folder / "optimizer.pt").write_bytes(b"state")
    return checkpoints.seal(folder, settings())


def test_only_checkpoints_that_are_as_their_manifest_says_are_seen(tmp_path):
    source = LocalCheckpoints(tmp_path / "checkpoints")
    assert source.look() == {}
    whole = make_checkpoint(source.root, 100)
    make_checkpoint(source.root, 200)
    half = make_adapter(source.root / "checkpoint-300")
    damaged = make_checkpoint(source.root, 400)
    (damaged / "optimizer.pt").write_bytes(b"stata")
    assert source.look() == {100: adapter_digest(whole), 200: adapter_digest(whole)}
    assert source.incomplete == {300: "it was not written to its end",
                                 400: "optimizer.pt is not what its manifest says"}
    assert source.get(100).folder == whole and source.get(100).results == FINAL
    checkpoints.seal(half, settings())
    assert sorted(source.look()) == [100, 200, 300]
    (whole / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(AdapterError, match="adapter_model.safetensors is not what its manifest says"):
        fetch(str(whole), tmp_path)


class Arriving:
    """Checkpoints of which each look shows more; a step's digest is its number unless `digests` says otherwise."""

    def __init__(self, *looks: list[int] | Exception, digests: dict[int, str] | None = None):
        self.looks, self.digests, self.incomplete, self.refused = list(looks), digests or {}, {}, set()

    def look(self) -> dict[int, str]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        return {step: self.digests.get(step, str(step)) for step in look}

    def get(self, step: int) -> Adapter:
        if step in self.refused:
            raise AdapterError(f"checkpoint-{step} is damaged")
        return Adapter(Path(self.digests.get(step, str(step))), "a folder")


TERMS = eval_watch.Terms("p", "t")


@pytest.fixture
def evaluated(monkeypatch) -> list[int]:
    """Replaces the evaluation by one that writes a result at once; lists the evaluated steps."""
    order: list[int] = []

    def evaluate(s, plan, on_cell):
        step = int(plan.label.removeprefix("checkpoint-"))
        assert plan.served == f"opencode-lora-{step}"
        order.append(step)
        cell = {"task": "t", "tool_calls": 1, "tokens": 5}
        status = "ungraded" if step == 30 and order.count(30) == 1 else "correct"
        result = report.compare([cell | {"status": "wrong"}], [cell | {"status": status}])
        result |= {"tasks": 1, "adapter_digest": str(plan.adapter.folder), "adapter_source": "a folder", "time": step,
                   **TERMS._asdict()}
        plan.out.parent.mkdir(parents=True, exist_ok=True)
        plan.out.write_text(json.dumps(result))

    monkeypatch.setattr(eval_watch, "evaluate", evaluate)
    monkeypatch.setattr(eval_watch, "terms_of", lambda s: TERMS)
    # in the watcher alone: other threads of this process go on by the clock
    monkeypatch.setattr(eval_watch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    return order


def watch(s: Settings, source: Arriving) -> int:
    return eval_watch.Watch(s, source, ResultsRepo("", s.run_path / "eval", "watch")).run()


@pytest.fixture
def idle(monkeypatch, evaluated) -> None:
    """EVAL_IDLE_LIMIT passes at the third look."""
    clock = iter(range(0, 10_000))
    monkeypatch.setattr(eval_watch.time, "monotonic", lambda: next(clock))


def test_newest_first_none_skipped_and_the_last_one_ends(tmp_path, evaluated, capsys):
    s = settings(RUN_DIR=str(tmp_path), MAX_STEPS="50")
    source = Arriving([], [10], [10], [10, 20, 30, 40], [10, 20, 30, 40], [10, 20, 30, 40, 50])
    assert watch(s, source) == 1  # the ungraded cell of checkpoint-30
    assert evaluated == [10, 40, 30, 50, 20]
    assert "3 checkpoints wait, newest first: 40, 30, 20" in capsys.readouterr().out
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert [p["step"] for p in summary["checkpoints"]] == [10, 20, 30, 40, 50]
    assert summary["checkpoints"][0]["adapter"]["pass_at_1"] == 1.0 and summary["time"] == 50
    assert "checkpoint-30" in (tmp_path / "eval" / "summary.md").read_text()
    assert (tmp_path / "eval" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    # The same command again tries what stayed ungraded, and nothing else.
    assert watch(s, Arriving([10, 20, 30, 40, 50])) == 0
    assert evaluated[5:] == [30]


def test_a_restart_goes_on_and_the_idle_limit_ends(tmp_path, evaluated, idle):
    s = settings(RUN_DIR=str(tmp_path), MAX_STEPS="50", EVAL_IDLE_LIMIT="3")
    watch(s, Arriving([10, 20]))
    (tmp_path / "eval" / "summary.json").unlink()  # killed between the result and the summary
    watch(s, Arriving([10, 20, 30]))
    assert evaluated == [20, 10, 30]
    assert len(json.loads((tmp_path / "eval" / "summary.json").read_text())["checkpoints"]) == 3
    watch(s, Arriving([20], digests={20: "other weights"}))
    assert evaluated[3:] == [20], "another run's checkpoint of the same step"


def test_results_under_other_terms_are_made_again_and_in_no_curve(tmp_path, evaluated, idle, monkeypatch):
    s = settings(RUN_DIR=str(tmp_path), MAX_STEPS="50", EVAL_IDLE_LIMIT="3")
    watch(s, Arriving([10, 20]))
    old = (tmp_path / "eval/checkpoint-10_results.json").read_text()
    (tmp_path / "eval/checkpoint-10_results.json").write_text(old.replace('"protocol": "p"', '"protocol": "q"'))
    assert [*eval_watch.read_results(tmp_path / "eval", TERMS)] == [20]
    watch(s, Arriving([10, 20]))
    assert evaluated == [20, 10, 10]


def test_a_lost_hub_is_waited_for_and_a_damaged_checkpoint_named(tmp_path, evaluated, idle, capsys):
    s = settings(RUN_DIR=str(tmp_path), MAX_STEPS="50", EVAL_IDLE_LIMIT="30")
    lost = HubError("the Hub is away")
    source = Arriving(lost, [10, 20], lost, [10, 20])
    source.refused, source.incomplete = {20}, {40: "its manifest is not there"}
    assert watch(s, source) == 0 and evaluated == [10]
    out = capsys.readouterr().out
    assert out.count("checkpoint-40 is not whole yet: its manifest is not there") == 1
    assert "WARN checkpoint-20 was not evaluated: checkpoint-20 is damaged" in out
    assert "WARN checkpoint-40 was not evaluated" in out
    with pytest.raises(HubError, match="away"):
        watch(s, Arriving(lost))
    with pytest.raises(HubError, match="no rights"):
        watch(s, Arriving(HubError("no rights", final=True)))
