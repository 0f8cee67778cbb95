"""Results on their way to the adapter repository and back to an empty disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_double import HubDouble

from recipe import hub as recipe_hub
from recipe import results_repo
from recipe.config import REPO as CHECKOUT
from recipe.hub import HubError
from recipe.results_repo import ResultsRepo

REPO = "me/adapter"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(recipe_hub, "FIRST_WAIT", 0.01)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def evaluation(hub: HubDouble) -> dict[str, str]:
    """File -> text of eval/ on the Hub."""
    return {path.removeprefix("eval/"): content.decode() for path, content in hub.repo(REPO).files().items()
            if path.startswith("eval/")}


@pytest.mark.parametrize("fault", [None, 429, 503, 412, "reset", "cut"])
def test_one_commit_with_what_has_changed_whatever_the_hub_does(hub: HubDouble, tmp_path, fault):
    repo = ResultsRepo(REPO, tmp_path / "eval", "watch")
    repo.check()
    write(repo.folder, cells__jsonl="{}\n", protocols__json="{}", summary__json="[1]", **{".hidden": "x"})
    if fault:
        hub.fail(2, fault, "/commit/")
    repo.push("first")
    repo._running.result()
    write(repo.folder, summary__json="[1, 2]")
    repo.push("second")
    repo.finish()
    assert evaluation(hub) == {"watch_cells.jsonl": "{}\n", "watch_protocols.json": "{}", "summary.json": "[1, 2]"}
    assert [c.message for c in hub.repo(REPO).commits[1:]] == ["first", "second"]


def test_a_hub_that_is_away_holds_nobody_and_loses_nothing(hub: HubDouble, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 2)
    repo = ResultsRepo(REPO, tmp_path / "eval", "watch")
    repo.check()
    outage = hub.fail(10_000, 503, "/commit/")
    for i in range(3):
        write(repo.folder, **{f"checkpoint-{i}_results__json": "{}"})
        repo.push(f"checkpoint-{i}")
        repo._running.exception()
    assert "WARN results were not pushed; they are kept and pushed with the next ones" in capsys.readouterr().out
    by_hand = f'RUN_DIR={tmp_path} ADAPTER_REPO={REPO} "$TRAINER_PYTHON" -m recipe.results_repo --push watch'
    with pytest.raises(HubError, match=re.escape(by_hand)):
        ResultsRepo.finish(repo)
    outage.times = 0
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    monkeypatch.setenv("ADAPTER_REPO", REPO)
    assert results_repo.main(["--push", "watch"]) == 0 and len(evaluation(hub)) == 3


def test_an_outage_that_ends_before_the_evaluation_costs_nothing(hub: HubDouble, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 1)
    repo = ResultsRepo(REPO, tmp_path / "eval", "watch")
    repo.check()
    hub.fail(1, 503, "/commit/")
    write(repo.folder, summary__json="[]")
    repo.push("first")
    repo._running.exception()
    repo.finish()
    assert evaluation(hub) == {"summary.json": "[]"}


CHILD = """
import signal, sys, time
from pathlib import Path
from recipe.results_repo import ResultsRepo

repo = ResultsRepo(sys.argv[1], Path(sys.argv[2]), "watch")
repo.push_on_sigterm()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("works", [True, False])
def test_sigterm_pushes_the_finished_cells_first(hub: HubDouble, tmp_path, works):
    folder = tmp_path / "eval"
    write(folder, cells__jsonl="1\n")
    hub.repo(REPO)
    if not works:
        hub.fail(10, 403, "/commit/")
    child = subprocess.Popen([sys.executable, "-c", CHILD, REPO, str(folder)], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(CHECKOUT)})
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    said, _ = child.communicate(timeout=300)
    assert child.returncode == 143, said
    assert evaluation(hub) == ({"watch_cells.jsonl": "1\n"} if works else {})
    assert (tmp_path / "pushing").exists() != works and ("--push watch" in said) != works


def test_a_push_does_not_wait(hub: HubDouble, tmp_path, monkeypatch):
    monkeypatch.setattr(results_repo, "PUSH_EVERY", -1)
    repo = ResultsRepo(REPO, tmp_path / "eval", "watch")
    repo.check()
    write(repo.folder, cells__jsonl="1\n")
    with hub.lock:  # the Hub answers nothing
        repo.push_sometimes()
        write(repo.folder, cells__jsonl="1\n2\n")
        repo.push_sometimes()
        assert not repo._running.done()
    repo.finish()
    assert evaluation(hub) == {"watch_cells.jsonl": "1\n2\n"}


def test_an_empty_disk_goes_on_from_the_hub(hub: HubDouble, tmp_path):
    assert ResultsRepo(REPO, tmp_path / "new", "watch").restore() == 0, "no repository yet"
    first = ResultsRepo(REPO, tmp_path / "first", "watch")
    first.check()
    write(first.folder, cells__jsonl='{"a": 1}\n{"b": 1}\n', protocols__json='{"p": {}}', summary__json="[]",
          **{"checkpoint-10_results__json": "{}", "checkpoint-10_final_results__json": "{}"})
    first.push("first")
    first.finish()
    ResultsRepo(REPO, tmp_path / "final", "final_results").restore()
    assert not (tmp_path / "final/cells.jsonl").exists(), "another evaluation's cells"
    empty = ResultsRepo(REPO, tmp_path / "empty", "watch")
    assert empty.restore() == 2
    assert sorted(p.name for p in empty.folder.iterdir() if p.is_file()) == [
        "cells.jsonl", "checkpoint-10_results.json", "protocols.json"]
    later = ResultsRepo(REPO, tmp_path / "later", "watch")
    write(later.folder, cells__jsonl='{"b": 1}\n{"c": 1}\n', protocols__json='{"q": {}}')
    assert later.restore() == 1
    assert (later.folder / "cells.jsonl").read_text() == '{"a": 1}\n{"b": 1}\n{"c": 1}\n'
    assert json.loads((later.folder / "protocols.json").read_text()) == {"p": {}, "q": {}}
    assert later.restore() == 0


def test_a_hub_that_can_not_be_asked_stops_the_start(hub: HubDouble, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 2)
    hub.fail(10_000, 503, "GET /api/")
    with pytest.raises(HubError, match="fetching eval/ of me/adapter"):
        ResultsRepo(REPO, tmp_path / "eval", "watch").restore()


def test_the_check_before_any_server(hub: HubDouble, monkeypatch, capsys):
    monkeypatch.setenv("ADAPTER_REPO", "")
    assert results_repo.main([]) == 0 and not hub.requests
    monkeypatch.setenv("ADAPTER_REPO", REPO)
    assert results_repo.main([]) == 0 and hub.repo(REPO).private
    hub.tokens["hf_read"] = "read"
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    assert results_repo.main([]) == 64 and "give it write permission" in capsys.readouterr().err
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 2)
    hub.fail(10_000, "reset", "/api/")
    assert results_repo.main([]) == 69
