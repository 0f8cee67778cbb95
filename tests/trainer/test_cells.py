"""Evaluation cells: grading, retries, the breaker, the log and what a second run takes from it."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field

import pytest

from recipe import cells as cells_module
from recipe.cells import Cell, CellLog, InfrastructureError, Job, MadeWith, finish, run_cells
from recipe.redact import Redactor


@dataclass
class Outcome:
    status: str = "graded"
    reason: str = ""
    reward: float | None = 1.0
    tool_calls: int = 2
    model_calls: int = 3
    tokens: int = 50
    prompt_tokens: int = 900
    seconds: float = 0.5
    trial_name: str = "trial-1"
    phases: dict[str, float] = field(default_factory=lambda: {"agent": 0.3})


CLEAN = Redactor()
DEAD = Outcome(status="ungraded", reason="sandbox did not start", reward=None)


def jobs(n: int, model: str = "base", **made_with: str) -> list[Job]:
    made = MadeWith(**({"protocol": "p1", "task": "t1", "adapter": ""} | made_with))
    return [Job(f"task-{i}", i, model, "served", made, "easy", "rows") for i in range(n)]


def collect(todo, run_one, **more) -> list[Cell]:
    cells: list[Cell] = []
    run_cells(todo, run_one, on_cell=cells.append, **({"concurrency": 3, "retries": 2, "backoff": 0} | more))
    return cells


@pytest.mark.parametrize("outcome, status, reward", [
    (Outcome(), "correct", 1.0),
    (Outcome(reward=0.0), "wrong", 0.0), (Outcome(reward=0.75), "wrong", 0.75),  # part of the tests
    (Outcome(reward=0.0, reason="agent timeout"), "wrong", 0.0),  # graded on the work done
    (Outcome(status="ungraded", reward=0.0, reason="401"), "ungraded", None),  # the verifier ran, the agent did not
    (Outcome(status="graded", reward=None), "ungraded", None),
])
def test_status(outcome, status, reward):
    cell = finish(jobs(1)[0], outcome, 1, CLEAN)
    assert (cell.status, cell.reward, cell.reason) == (status, reward, outcome.reason)


def test_the_stored_token_is_read_once_a_run(monkeypatch):
    read = []
    monkeypatch.setattr(cells_module, "stored_token", lambda: read.append(1) or ["a-stored-token"])
    cells = collect(jobs(3), lambda job: Outcome(reason="a-stored-token"))
    assert [cell.reason for cell in cells] == ["[secret removed]"] * 3 and read == [1]


def test_the_reason_has_no_secret(monkeypatch):
    keys = {"CAPTURE_ADMIN_KEY": "admin-key-of-this-job", "HF_TOKEN": "hf_" + "a1" * 12}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    session = "s" + "0a" * 12
    refused = Outcome(status="ungraded", reward=None, reason=f"401: x-api-key {session}, {' '.join(keys.values())}")
    (cell,) = collect(jobs(1), lambda job: refused, retries=0)
    assert cell.reason == "401: x-api-key [session key removed], [secret removed] [secret removed]"


def test_all_cells_run_once_and_in_order_when_graded():
    seen: list[int] = []
    cells = collect(jobs(20), lambda job: seen.append(job.index) or Outcome(), concurrency=1)
    assert seen == list(range(20)) and [c.task for c in cells] == [f"task-{i}" for i in range(20)]
    assert {c.attempts for c in cells} == {1}


def test_concurrency_is_used_and_not_exceeded():
    lock, barrier, running, peak = threading.Lock(), threading.Barrier(4), [0], [0]

    def run_one(job):
        with lock:
            running[0] += 1
            peak[0] = max(peak[0], running[0])
        barrier.wait(timeout=240)  # passes only when four run at once
        with lock:
            running[0] -= 1
        return Outcome()

    assert len(collect(jobs(12), run_one, concurrency=4)) == 12
    assert peak[0] == 4


def test_ungraded_is_retried_with_a_fresh_rollout_then_shown():
    calls: dict[int, int] = {}

    def run_one(job):
        calls[job.index] = calls.get(job.index, 0) + 1
        return DEAD if job.index == 0 or (job.index == 1 and calls[1] < 3) else Outcome()

    cells = {c.task: c for c in collect(jobs(6), run_one, concurrency=1)}
    assert (cells["task-0"].status, cells["task-0"].attempts, cells["task-0"].reason) == (
        "ungraded", 3, "sandbox did not start")
    assert (cells["task-1"].status, cells["task-1"].attempts) == ("correct", 3)
    assert calls == {0: 3, 1: 3, 2: 1, 3: 1, 4: 1, 5: 1}


def test_breaker_stops_after_failures_in_a_row_and_keeps_graded_cells():
    cells: list[Cell] = []
    count = [0]

    def run_one(job):
        count[0] += 1
        return Outcome() if job.index < 5 else DEAD

    with pytest.raises(InfrastructureError, match="8 rollouts in a row did not run.*sandbox did not start"):
        run_cells(jobs(100), run_one, concurrency=1, retries=2, backoff=0, breaker=8, on_cell=cells.append)
    assert [c.status for c in cells][:5] == ["correct"] * 5
    assert all(c.status == "ungraded" and c.attempts == 3 for c in cells[5:])
    assert count[0] == 5 + 8, "the other 90 tasks must not be burnt"


def test_a_dead_server_stops_at_once_and_its_cells_stay_unfinished():
    cells: list[Cell] = []
    with pytest.raises(InfrastructureError, match="policy server is gone"):
        run_cells(jobs(50), lambda job: Outcome() if job.index < 2 else DEAD, concurrency=1, retries=2, backoff=0,
                  on_cell=cells.append, healthy=lambda: "policy server is gone")
    assert [c.task for c in cells] == ["task-0", "task-1"]


def test_graded_results_reset_the_breaker():
    outcomes = [DEAD if i % 3 else Outcome() for i in range(60)]
    cells = collect(jobs(60), lambda job: outcomes[job.index], concurrency=1, retries=0, breaker=3)
    assert len(cells) == 60


def test_an_error_of_the_caller_is_raised():
    def broken(cell):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_cells(jobs(10), lambda job: Outcome(), concurrency=2, retries=0, on_cell=broken)


def test_log_resumes_graded_cells_only(tmp_path):
    log = CellLog(tmp_path / "eval" / "cells.jsonl")
    todo = jobs(4)
    for job, outcome in zip(todo, [Outcome(), Outcome(reward=0.0), DEAD, Outcome()], strict=True):
        log.append(finish(job, outcome, 1, CLEAN))
    found, stale = log.graded(todo)
    assert {j.index: c["status"] for j, c in found.items()} == {0: "correct", 1: "wrong", 3: "correct"}
    assert stale == {}
    line = json.loads(log.path.read_text().splitlines()[0])
    assert line == line | {
        "task": "task-0", "sample": 0, "difficulty": "easy", "model": "base", "status": "correct", "reason": "",
        "tool_calls": 2, "model_calls": 3, "tokens": 50, "prompt_tokens": 900, "seconds": 0.5, "trial": "trial-1",
        "phases": {"agent": 0.3}, "attempts": 1, "made_with": {"protocol": "p1", "task": "t1", "adapter": ""}}
    log.append(finish(todo[2], Outcome(), 2, CLEAN))  # the later line counts
    assert log.graded(todo)[0][todo[2]]["status"] == "correct"


def test_log_cells_of_other_settings_are_stale_until_those_come_back(tmp_path):
    log = CellLog(tmp_path / "cells.jsonl")
    for job in jobs(3):
        log.append(finish(job, Outcome(), 1, CLEAN))
    for change in ({"protocol": "p2"}, {"task": "t2"}, {"adapter": "a2"}):
        found, stale = log.graded(jobs(3, **change))
        assert not found and [*stale.values()] == [MadeWith("p1", "t1", "")] * 3
    log.append(finish(jobs(1, protocol="p2")[0], Outcome(reward=0.0), 1, CLEAN))
    assert [c["status"] for c in log.graded(jobs(3))[0].values()] == ["correct"] * 3


def test_samples_of_a_task_are_cells_of_their_own(tmp_path):
    from dataclasses import replace

    log = CellLog(tmp_path / "cells.jsonl")
    (job,) = jobs(1)
    log.append(finish(job, Outcome(), 1, CLEAN))
    second = replace(job, sample=1)
    assert log.graded([job, second]) == ({job: log.read()[0]}, {})
    log.append(finish(second, Outcome(reward=0.0), 1, CLEAN))
    assert [c["status"] for c in log.of([job, second]).values()] == ["correct", "wrong"]


def test_log_survives_a_torn_line(tmp_path):
    log = CellLog(tmp_path / "cells.jsonl")
    first, second, third = jobs(3)
    log.append(finish(first, Outcome(), 1, CLEAN))
    log.append(finish(second, Outcome(), 1, CLEAN))
    text = log.path.read_bytes()
    log.path.write_bytes(text[:-40])  # killed while it wrote the second line
    log.append(finish(third, Outcome(), 1, CLEAN))
    assert [c["task"] for c in log.read()] == ["task-0", "task-2"]
