"""Evaluation cells: one held-out task with one model, run until graded, kept on disk one JSON line each.

A cell is correct, wrong or ungraded (its rollout did not run: dead sandbox, refused key, an agent that lost its
model). Ungraded attempts are repeated with a fresh session; a breaker stops a run in which the infrastructure fails
before it burns the task set. Only finished cells are written, so a run that stops goes on where it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from recipe import json_lines
from recipe.redact import Redactor, stored_token
from recipe.rewards import CORRECT


class Outcome(Protocol):
    """What one evaluation rollout reports (recipe.harbor_sessions.EvalRollout)."""

    status: str  # "graded" or "ungraded"
    reason: str  # why it is ungraded, or a remark such as "agent timeout"
    reward: float | None
    tool_calls: int
    model_calls: int
    tokens: int
    prompt_tokens: int
    seconds: float
    trial_name: str
    phases: dict[str, float]


class MadeWith(NamedTuple):
    """Digests of all that could change a cell's result: a cell is reused only where each of them still holds."""

    protocol: str  # recipe/protocol.py
    task: str  # the task's files
    adapter: str = ""  # the adapter's files; empty for the base


@dataclass(frozen=True)
class Job:
    """One cell to fill. `model` is the label in results; `served` the name the engine knows."""

    task: str
    index: int
    model: str
    served: str
    made_with: MadeWith
    difficulty: str = ""
    kind: str = ""
    sample: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.model, self.sample


@dataclass(frozen=True)
class Cell:
    """One finished cell; `tokens` were sampled, `prompt_tokens` summed over calls. `seconds`, `phases` (seconds too:
    recipe/phases.py) and `trial`, a folder in RUN_DIR/trials, are the last attempt's; `time` is Unix time."""

    task: str
    sample: int
    difficulty: str
    kind: str
    model: str
    status: str
    reason: str
    reward: float | None
    tool_calls: int
    model_calls: int
    tokens: int
    prompt_tokens: int
    seconds: float
    phases: dict[str, float]
    attempts: int
    trial: str
    made_with: MadeWith
    time: float


class InfrastructureError(RuntimeError):
    """Rollouts fail for a reason that is not the model's: evaluation stops, finished cells are kept."""


class CellLog:
    """Append-only eval/cells.jsonl. A later line of the same cell, made with the same, replaces an earlier one."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, cell: Cell) -> None:
        with self._lock:
            json_lines.append(self.path, asdict(cell) | {"made_with": cell.made_with._asdict()})

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a line torn by a kill is skipped, its cell counts as unfinished."""
        return [cell for cell in json_lines.read(self.path) if "made_with" in cell]

    def of(self, jobs: Iterable[Job]) -> dict[Job, dict[str, Any]]:
        """The last line of each job that was made with what the job asks for."""
        lines = {(c["task"], c["model"], c["sample"], *MadeWith(**c["made_with"])): c for c in self.read()}
        return {job: lines[key] for job in jobs if (key := (*job.key, *job.made_with)) in lines}

    def graded(self, jobs: Iterable[Job]) -> tuple[dict[Job, dict[str, Any]], dict[Job, MadeWith]]:
        """The cells of `jobs` that need no new run, and what the others' graded cells were made with instead."""
        jobs = list(jobs)
        found = {job: cell for job, cell in self.of(jobs).items() if cell["status"] != "ungraded"}
        last = {(c["task"], c["model"], c["sample"]): c for c in self.read() if c["status"] != "ungraded"}
        stale = {job: MadeWith(**last[job.key]["made_with"]) for job in jobs if job not in found and job.key in last}
        return found, stale


def finish(job: Job, outcome: Outcome, attempts: int, clean: Redactor) -> Cell:
    """The cell of a rollout's outcome. Its reason, which may quote what the agent or a server wrote, goes to a
    repository with it: without secrets."""
    if outcome.status == "graded" and outcome.reward is not None:
        status = "correct" if outcome.reward >= CORRECT else "wrong"
    else:
        status = "ungraded"
    return Cell(task=job.task, sample=job.sample, difficulty=job.difficulty, kind=job.kind, model=job.model,
                status=status, reason=clean.text(outcome.reason),
                reward=outcome.reward if status != "ungraded" else None,
                tool_calls=outcome.tool_calls, model_calls=outcome.model_calls, tokens=outcome.tokens,
                prompt_tokens=outcome.prompt_tokens, seconds=round(outcome.seconds, 3), phases=outcome.phases,
                attempts=attempts, trial=outcome.trial_name, made_with=job.made_with, time=time.time())


def run_cells(jobs: Sequence[Job], run_one: Callable[[Job], Outcome], *, concurrency: int, retries: int,
              on_cell: Callable[[Cell], None], healthy: Callable[[], str | None] = lambda: None,
              breaker: int = 0, backoff: float = 2.0) -> None:
    """Runs `jobs`, `concurrency` at once and in order; `on_cell` gets each finished cell, from one thread.

    An ungraded attempt is repeated up to `retries` times, `backoff` seconds · attempt later. After each ungraded
    attempt `healthy()` is asked and may name a dead server or route; that, or `breaker` ungraded attempts in a row
    over all cells (0: two rounds of `concurrency`, at least 8), raises InfrastructureError. Cells in flight are then
    let finish, and kept when graded; the rest stay unfinished.
    """
    breaker, clean = breaker or max(8, 2 * concurrency), Redactor(stored_token())
    stop, lock = threading.Event(), threading.Lock()
    state = {"in_a_row": 0, "why": ""}

    def trip(why: str) -> None:
        state["why"] = state["why"] or why
        stop.set()

    def attempt_until_graded(job: Job) -> Cell | None:
        for attempt in range(1, retries + 2):
            cell = finish(job, run_one(job), attempt, clean)
            with lock:
                if cell.status != "ungraded":
                    state["in_a_row"] = 0
                    return cell
                state["in_a_row"] += 1
                if state["in_a_row"] >= breaker:
                    trip(f"{state['in_a_row']} rollouts in a row did not run; the last reason: {cell.reason}")
            dead = healthy()
            if dead:
                trip(dead)
            if stop.is_set() and attempt <= retries:
                return None  # not all its attempts were made: the cell is unfinished, not ungraded
            if attempt <= retries:
                stop.wait(backoff * attempt)
        return cell

    queue = iter(jobs)
    running: set[Future[Cell | None]] = set()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="cell") as pool:
        try:
            while True:
                while len(running) < concurrency and not stop.is_set() and (job := next(queue, None)):
                    running.add(pool.submit(attempt_until_graded, job))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    cell = future.result()
                    if cell is not None:
                        on_cell(cell)
        except BaseException:
            stop.set()
            raise
    if stop.is_set():
        raise InfrastructureError(state["why"])
