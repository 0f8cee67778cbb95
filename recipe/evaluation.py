"""One comparison of an adapter with the base on the held-out tasks, as eval_adapter.py and eval_watch.py both run it.

Base and adapter cells alternate on one engine, so that both meet the same load, and go through the same chain as
training: sandbox, OpenCode, capture proxy, verifier, with the same sampling, output cap and limits.
"""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe import pristine, report, subset, watchdog
from recipe.adapters import ADAPTER_FILES, check_adapter
from recipe.cells import Cell, CellLog, InfrastructureError, Job, fingerprint, run_cells
from recipe.config import Settings
from recipe.harbor_sessions import run_eval_rollout, served_tasks
from recipe.policy_client import PolicyClient, PolicyError

SPLIT = "test"
BASE = "base"  # label of base cells; adapters have the label of their checkpoint
# Settings that decide what a cell measures; any change makes old cells stale.
DECISIVE = ("model", "model_revision", "dtype", "temperature", "top_p", "top_k", "max_output_tokens", "max_model_calls",
            "agent_timeout", "max_model_len", "opencode_version", "opencode_lean", "sandbox")


@dataclass(frozen=True)
class EvalTask:
    """A held-out task as the env server serves it: `index` in its split, groups from task.toml, hash of its files."""

    name: str
    index: int
    difficulty: str
    kind: str
    digest: str


def held_out_tasks(settings: Settings) -> list[EvalTask]:
    """The N_TASKS held-out tasks of an evaluation: all that are served, or a stratified subset that never changes."""
    tasks = [_task(settings.run_path / "tasks" / SPLIT / ref.task_name.rsplit("/", 1)[-1], ref)
             for ref in served_tasks(settings.env_url, SPLIT)]
    return stratified(tasks, settings.n_tasks)


def _task(folder: Path, ref: Any) -> EvalTask:
    try:
        meta = tomllib.loads((folder / "task.toml").read_text()).get("metadata", {})
    except FileNotFoundError as err:
        raise InfrastructureError(f"the env server serves task {ref.task_name}, but {folder} does not exist: prepare "
                                  "the tasks into this run folder and start the env server on it") from err
    return EvalTask(ref.task_name, ref.index, str(meta.get("difficulty_tier", "")), str(meta.get("kind", "")),
                    digest_of(sorted(p for p in folder.rglob("*") if p.is_file())))


def stratified(tasks: Sequence[EvalTask], n: int) -> list[EvalTask]:
    """`n` of `tasks` with each (difficulty, kind) in its share, the same for every checkpoint, run and order served.

    Raises ValueError when fewer than `n` tasks exist.
    """
    if n > len(tasks):
        raise ValueError(f"N_TASKS={n}, but only {len(tasks)} held-out tasks are served: lower N_TASKS or prepare more")
    chosen = subset.stratified(tasks, n, lambda t: t.name.rsplit("/", 1)[-1], lambda t: (t.difficulty, t.kind))
    return sorted(chosen, key=lambda t: t.index)


def digest_of(files: Iterable[Path]) -> str:
    """Short hash of the names and contents of `files`."""
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def adapter_digest(adapter: Path) -> str:
    """Names the weights and the configuration of an adapter folder."""
    return digest_of(adapter / name for name in ADAPTER_FILES)


def make_jobs(settings: Settings, tasks: Sequence[EvalTask], adapter: Path, label: str, served: str) -> list[Job]:
    """Base and adapter cells of all tasks, alternating."""
    common = {name: getattr(settings, name) for name in DECISIVE}
    if Path(settings.model).is_dir():
        common["model_files"] = digest_of(sorted(p for p in Path(settings.model).iterdir() if p.is_file()))
    weights = adapter_digest(adapter)
    jobs = []
    for t in tasks:
        for model, name, more in ((BASE, settings.model, {}), (label, served, {"adapter": weights})):
            jobs.append(Job(t.name, t.index, model, name, fingerprint(task=t.digest, **common, **more),
                            t.difficulty, t.kind))
    return jobs


class Progress:
    """Counts finished cells, beats the heart, and prints a line now and then with the time that is left."""

    def __init__(self, run: Path, jobs: Sequence[Job], finished: Iterable[dict[str, Any]], say: Callable[[str], None]):
        self.run, self.total, self.say = run, len(jobs), say
        self.counts = {job.model: dict.fromkeys(("correct", "wrong", "ungraded"), 0) for job in jobs}
        self.done = 0
        for cell in finished:
            self._count(cell["model"], cell["status"])
        self.reused, self.start = self.done, time.monotonic()
        self.every = max(1, self.total // 16)

    def _count(self, model: str, status: str) -> None:
        self.counts[model][status] += 1
        self.done += 1

    def cell(self, cell: Cell) -> None:
        self._count(cell.model, cell.status)
        watchdog.beat(self.run / watchdog.HEARTBEAT, "eval", cells=self.done, of=self.total)
        if cell.status == "ungraded":
            self.say(f"ungraded after {cell.attempts} attempts: {cell.task} with {cell.model}: {cell.reason}")
        if self.done % self.every == 0 or self.done == self.total:
            rate = (self.done - self.reused) / max(time.monotonic() - self.start, 1e-9)
            scores = "  ".join(f"{model} {c['correct']}/{c['correct'] + c['wrong']}"
                               for model, c in self.counts.items())
            ungraded = sum(c["ungraded"] for c in self.counts.values())
            self.say(f"cell {self.done}/{self.total}  {scores}  ungraded {ungraded}  {60 * rate:.1f} cells/min  "
                     f"ETA {(self.total - self.done) / rate / 60:.1f} min")


def evaluate(settings: Settings, adapter: Path, label: str, served: str, out: Path,
             say: Callable[[str], None] = lambda text: print(text, flush=True)) -> dict[str, Any]:
    """Evaluates `adapter` (cells get `label`, the engine serves it as `served`) against the base; writes and returns
    the result.

    Resumes from eval/cells.jsonl of the run folder. Raises NotPristine, PolicyError or InfrastructureError when the
    servers cannot be trusted or reached; finished cells are kept.
    """
    check_adapter(adapter)
    run = settings.run_path
    watchdog.beat(run / watchdog.HEARTBEAT, "eval-setup", adapter=label)
    tasks = held_out_tasks(settings)
    client = PolicyClient(settings.policy_url)
    client.load_adapter(served, adapter)
    try:
        engine = pristine.check(settings, client, adapter, served)
        say(f"engine checked on {engine['tokens']} tokens, mean |Δlogp|: base against its files "
            f"{engine['base_against_files']:.2g}, adapter against its files {engine['adapter_against_files']:.2g}, "
            f"adapter against base {engine['adapter_against_base']:.2g}")
        jobs = make_jobs(settings, tasks, adapter, label, served)
        log = CellLog(run / "eval" / "cells.jsonl")
        finished, stale = log.graded(jobs)
        if stale:
            say(f"{stale} earlier cells are run again: model, adapter, tasks or limits have changed since")
        if finished:
            say(f"{len(finished)} of {len(jobs)} cells are taken from {log.path}")
        progress = Progress(run, jobs, finished.values(), say)
        watchdog.beat(run / watchdog.HEARTBEAT, "eval", cells=progress.done, of=len(jobs))

        def on_cell(cell: Cell) -> None:
            log.append(cell)
            progress.cell(cell)

        run_cells([job for job in jobs if job not in finished],
                  lambda job: run_eval_rollout(settings, SPLIT, job.index, job.served),
                  concurrency=settings.eval_concurrency, retries=settings.eval_retries, on_cell=on_cell,
                  healthy=client.unhealthy)
    finally:
        try:
            client.unload_adapter(served)
        except PolicyError as err:
            say(f"adapter {served} was not unloaded: {err}")
    cells = {(c["task"], c["model"]): c for c in log.read()}
    base, other = ([cells[job.task, job.model] for job in jobs if job.model == model] for model in (BASE, label))
    result = {"adapter_name": label, "adapter_path": str(adapter), "adapter_digest": adapter_digest(adapter),
              "tasks": len(tasks), "time": time.time(), **report.compare(base, other), "engine": engine,
              "settings": settings.as_dict()}
    watchdog.write_atomic(out, json.dumps(result, indent=2) + "\n")
    return result


def ungraded(result: dict[str, Any]) -> int:
    return result["base"]["ungraded"] + result["adapter"]["ungraded"]
