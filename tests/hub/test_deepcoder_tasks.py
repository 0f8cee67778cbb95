"""RECIPE=deepcoder through prepare_tasks.py: a dataset of DeepCoder's shape, read by `datasets` from the double."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path

import pytest
from hub_double import HubDouble

import prepare_tasks
from recipe import deepcoder, made_problems, stdin_verifier
from recipe import hub as recipe_hub
from recipe.config import SettingsError

N = 40
README = """---
configs:
- config_name: other
  data_files: [{split: train, path: other/train-*}]
- config_name: primeintellect
  data_files: [{split: train, path: primeintellect/train-*}]
---
"""


def rows() -> list[dict]:
    """Problems made here, and between them what the published dataset has, too: duplicates and unusable ones."""
    found = made_problems.rows(N)
    found[3]["problem"] = found[11]["problem"]  # the same statement twice
    found[5]["tests"] = found[5]["tests"][:2]
    found[6]["tests"] = [t | {"type": "function_call"} for t in found[6]["tests"][:10]] + found[6]["tests"][10:]
    found[7]["tests"] = [t | {"output": None} for t in found[7]["tests"]]
    untyped = [t | {"type": None} for t in found[9]["tests"]]
    found[9]["tests"] = [*untyped, found[9]["tests"][0] | {"type": "function_call"}]
    found[12]["problem"] = made_problems.PREFIX
    return found


def published(*parts: list[dict]) -> dict[str, bytes]:
    """The files of a dataset repository with these rows, one parquet file for each part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {"README.md": README.encode(), "other/train-00000-of-00001.parquet": b"not read"}
    for i, part in enumerate(parts):
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(part), buffer)
        files[f"primeintellect/train-{i:05d}-of-{len(parts):05d}.parquet"] = buffer.getvalue()
    return files


UNUSABLE = (5, 6, 7, 12)


@pytest.fixture(params=["list", "JSON string"])
def dataset(request, hub: HubDouble, tmp_path, monkeypatch) -> str:
    """A dataset on the double in two files; `tests` is a list or a JSON string of one."""
    table = rows()
    if request.param == "JSON string":
        table = [row | {"tests": json.dumps(row["tests"])} for row in table]
    name = f"owner/problems-{request.param[0]}"
    hub.repo(name, "dataset").add("problems", published(table[:15], table[15:]))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(recipe_hub, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 3)
    deepcoder.hub_rows.cache_clear()
    for variable, value in {"RECIPE": "deepcoder", "DATASET": name, "N_TRAIN_TASKS": "20", "N_TASKS": "10",
                            "PRESET": "job", "SEED": "0"}.items():
        monkeypatch.setenv(variable, value)
    return name


def prepared(out: Path) -> dict[str, list[str]]:
    deepcoder.hub_rows.cache_clear()
    assert prepare_tasks.main(["--out", str(out)]) == 0
    return {split: json.loads((out / f"{split}.json").read_text())["tasks"] for split in ("train", "test")}


def test_usable_problems_become_tasks_that_the_seed_shuffles(dataset, hub, tmp_path, monkeypatch):
    names = prepared(tmp_path / "a")
    assert (len(names["train"]), len(names["test"])) == (20, 10)
    assert len({*names["train"], *names["test"]}) == 30, "none twice, none in both splits"
    bad = {deepcoder.Problem(deepcoder.clean(row["problem"]), ()).name for row in (rows()[i] for i in UNUSABLE)}
    assert not bad & {*names["train"], *names["test"]}
    assert hub.count("other/train") == 0

    assert prepared(tmp_path / "a") == names
    monkeypatch.setenv("SEED", "1")
    other = prepared(tmp_path / "b")
    assert other["test"] == names["test"], "held-out problems are the same in every run"
    assert other["train"] != names["train"] and not {*other["train"]} & {*other["test"]}

    kept = 0
    for folder in (p for split in ("train", "test") for p in (tmp_path / "a" / split).iterdir()):
        text = (folder / "instruction.md").read_text()
        tests = json.loads((folder / "tests/tests.json").read_text())
        assert 3 <= len(tests) <= 12 and all(isinstance(t["output"], str) for t in tests)
        assert "Solve the following coding problem" not in text and "Now solve" not in text
        assert "The input will be given via stdin" not in text and "Example 2" in text and "solution.py" in text
        assert not any(t["input"] in text for t in tests if len(t["input"]) > 20), "held-out tests are not shown"
        toml = tomllib.loads((folder / "task.toml").read_text())
        assert toml["verifier"]["timeout_sec"] > 6 * len(tests) + 30
        assert (folder / "tests/verify.py").read_text() == Path(stdin_verifier.__file__).read_text()
        assert re.fullmatch(r"deepcoder_[0-9a-f]{12}", folder.name)
        kept += 1
    assert kept == 30
    seen = {str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*tests.json")}
    assert all("/tests/" in path for path in seen), "nowhere else, and so in no sandbox before the agent has ended"


def test_too_few_problems_are_said_and_nothing_is_written(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("N_TRAIN_TASKS", "100")
    assert prepare_tasks.main(["--out", str(tmp_path / "out")]) == 64
    assert re.search(r"only 2\d problems left for training .* lower N_TRAIN_TASKS", capsys.readouterr().err)
    assert not (tmp_path / "out/train.json").exists()


def test_a_dataset_that_is_not_there_is_named_at_once(dataset, hub, tmp_path, monkeypatch, capsys):
    for variable, value in (("DATASET", "owner/nothing"), ("DATASET_CONFIG", "nothing")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert prepare_tasks.main(["--out", str(tmp_path / "out")]) == 64
        assert f"{variable}={'owner/' * (variable == 'DATASET')}nothing" in capsys.readouterr().err
    outage = hub.fail(10_000, 503, "resolve|revision|tree")
    assert prepare_tasks.main(["--out", str(tmp_path / "out")]) == 69
    error = capsys.readouterr().err
    assert f"reading {dataset} (primeintellect): still failing after 3 attempts" in error and "continue with" in error
    outage.times = 0
    assert prepare_tasks.main(["--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(("tests", "usable"), [
    ([{"input": "1\n", "output": "2\n"}, {"type": "stdin_stdout", "input": None, "output": ""}],
     [("1\n", "2\n"), ("", "")]),
    ([{"input": [1, 2], "output": "3"}, {"input": "1", "output": ["3"]}, {"input": "1", "output": None}, {"input": "1"},
      {"type": "function_call", "input": "1", "output": "2"}, "x"], []),
    ({"inputs": ["1"], "outputs": ["2"]}, []), (None, []), ([], []), ('[{"input": "1", "out', None), ("", None)])
def test_tests_of_another_form_are_left_out(tests, usable):
    """A list, or a JSON string of one; a damaged row is a problem without tests, not the end of the preparation."""
    assert deepcoder.stdin_tests(tests) == (usable or [])
    if usable is not None:
        assert deepcoder.stdin_tests(json.dumps(tests)) == usable


@pytest.mark.parametrize(("text", "statement"), [
    (deepcoder.PREFIX + "\n\nAdd.\n\nThe input will be stdin.\n\nNow solve the problem by providing the code.", "Add."),
    ("Add.\nNow solve this problem: ...", "Add."), ("  Add.  ", "Add."),
    ("The input will be large. Add.\nThe input will be given via stdin.", "The input will be large. Add."),
    (f"Not at the start: {deepcoder.PREFIX}", f"Not at the start: {deepcoder.PREFIX}")])
def test_boilerplate_is_stripped(text, statement):
    assert deepcoder.clean(text) == statement


def test_made_problems_are_solved_by_their_solutions_and_none_is_like_another(tmp_path):
    import subprocess
    import sys

    made = made_problems.rows(2 * len(made_problems.KINDS))
    for row in made:
        for test in row["tests"][:3]:
            done = subprocess.run([sys.executable, "-I", "-S", "-c", row["solutions"][0]], input=test["input"],
                                  capture_output=True, text=True, timeout=60)
            assert stdin_verifier.same(done.stdout, test["output"]), (row["problem"], test, done)
    everything = [deepcoder.problem_of(row) for row in made_problems.rows(300)]
    assert len({p.name for p in everything}) == len({p.tests for p in everything}) == 300
    with pytest.raises(SettingsError, match="left for evaluation"):
        deepcoder.choose(made[:2], "train", 1, 3, 0)
    assert made_problems.main(["3", str(tmp_path / "p.jsonl")]) == 0
    assert [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()] == made[:3]
