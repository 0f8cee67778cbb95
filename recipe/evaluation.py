"""One comparison of an adapter with the base on the held-out tasks, as eval_adapter.py and eval_watch.py both run it.

Base and adapter cells alternate on one engine, so that both meet the same load, and go through the same chain as
training: sandbox, OpenCode, capture proxy, verifier, with the same sampling, output cap and limits.
"""

from __future__ import annotations

import contextlib
import json
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe import digests, eval_health, phases, pristine, report, subset, task_source, watchdog
from recipe.adapters import Adapter, adapter_digest, check_adapter, check_model, model_digest
from recipe.cells import Cell, CellLog, InfrastructureError, Job, MadeWith, run_cells
from recipe.config import Settings
from recipe.harbor_sessions import run_eval_rollout, served_tasks
from recipe.policy_client import PolicyClient, PolicyError
from recipe.protocol import Protocols, describe

SPLIT = "test"
BASE = "base"  # label of base cells; adapters have the label of their checkpoint


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
    try:
        served = served_tasks(settings.env_url, SPLIT)
    except OSError as err:
        raise InfrastructureError(f"{err}, or evaluate with bash run_eval.sh, which does") from err
    tasks = [_task(settings.run_path / "tasks" / SPLIT / ref.task_name.rsplit("/", 1)[-1], ref) for ref in served]
    return stratified(tasks, settings.n_tasks)


def _task(folder: Path, ref: Any) -> EvalTask:
    try:
        meta = tomllib.loads((folder / "task.toml").read_text()).get("metadata", {})
    except FileNotFoundError as err:
        raise InfrastructureError(f"the env server serves task {ref.task_name}, but {folder} does not exist: prepare "
                                  "the tasks into this run folder and start the env server on it") from err
    return EvalTask(ref.task_name, ref.index, str(meta.get("difficulty_tier", "")), str(meta.get("kind", "")),
                    digests.of_tree(folder))


def stratified(tasks: Sequence[EvalTask], n: int) -> list[EvalTask]:
    """`n` of `tasks`, the same for every checkpoint, run and order served.

    Every difficulty, and within it every kind, has its share to within one task. Raises ValueError when fewer than `n`
    tasks exist.
    """
    if n > len(tasks):
        raise ValueError(f"N_TASKS={n}, but only {len(tasks)} held-out tasks are served: lower N_TASKS or prepare more")
    chosen = subset.stratified(tasks, n, lambda t: t.name.rsplit("/", 1)[-1], lambda t: t.difficulty, lambda t: t.kind)
    return sorted(chosen, key=lambda t: t.index)


def make_jobs(tasks: Sequence[EvalTask], samples: int, protocol: str, adapter: str, label: str, base_name: str,
              served: str) -> list[Job]:
    """Base and adapter cells of all tasks, alternating, one round of them after the other. `protocol` and `adapter`
    are digests; the engine knows the base as `base_name` and the adapter as `served`."""
    return [Job(t.name, t.index, model, name, MadeWith(protocol, t.digest, weights), t.difficulty, t.kind, sample)
            for sample in range(samples) for t in tasks
            for model, name, weights in ((BASE, base_name, ""), (label, served, adapter))]


def why_again(stale: Mapping[Job, MadeWith], protocols: Protocols) -> list[str]:
    """One line for each reason for which earlier cells do not count any more."""
    reasons: Counter[str] = Counter()
    for job, then in stale.items():
        now = job.made_with
        if then.protocol != now.protocol:
            reasons[", ".join(protocols.differences(then.protocol, now.protocol))] += 1
        elif then.task != now.task:
            reasons["their tasks' files have changed"] += 1
        else:
            reasons["the adapter's weights are other ones"] += 1
    return [f"{count} earlier cells are run again: {reason}" for reason, count in reasons.items()]


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


@dataclass(frozen=True)
class Plan:
    """What one evaluation compares: `adapter`, whose cells get `label` and which the engine serves as `served` and the
    digest of its weights, against the base; the result goes to `out`.

    With `holds` "base" or "trained", `adapter` is a whole model (LORA=0), which an engine can't hold beside the base:
    only the cells of the one that it holds, under the name of MODEL, are run, and "trained" is the one with a result.
    """

    adapter: Adapter
    label: str
    served: str
    out: Path
    holds: str = "both"

    def of_weights(self, digest: str) -> Plan:
        """With a name for these weights alone: vLLM 0.26 tells what it cached of adapters apart by their names."""
        return replace(self, served=f"{self.served}-{digest[:8]}") if self.holds == "both" else self

    def runs(self, job: Job) -> bool:
        return self.holds == "both" or (job.model == BASE) == (self.holds == "base")


@contextlib.contextmanager
def engine_of(settings: Settings, plan: Plan, client: PolicyClient, say: Callable[[str], None]
              ) -> Iterator[dict[str, Any]]:
    """While the engine serves what `plan` compares: what the check of its weights measured. Raises NotPristine."""
    folder = plan.adapter.folder
    if plan.holds != "both":
        engine = pristine.check_model(settings, client, folder if plan.holds == "trained" else None)
        say(f"engine checked on {engine['tokens']} tokens, mean |Δlogp|: {plan.holds} model against its files "
            f"{engine['model_against_files']:.2g}")
        yield engine
        return
    client.load_adapter(plan.served, folder)
    try:
        engine = pristine.check(settings, client, folder, plan.served)
        say(f"engine checked on {engine['tokens']} tokens, mean |Δlogp|: base against its files "
            f"{engine['base_against_files']:.2g}, adapter against its files {engine['adapter_against_files']:.2g}, "
            f"adapter against base {engine['adapter_against_base']:.2g}")
        yield engine
    finally:
        try:
            client.unload_adapter(plan.served)
        except PolicyError as err:
            say(f"adapter {plan.served} was not unloaded: {err}")


def evaluate(settings: Settings, plan: Plan, on_cell: Callable[[], None] = lambda: None,
             say: Callable[[str], None] = lambda text: print(text, flush=True)) -> dict[str, Any] | None:
    """Runs the cells of `plan` that are missing, writes and returns the result, None where `plan` holds only the base;
    `on_cell` is called after each cell.

    Resumes from eval/cells.jsonl of the run folder. Raises NotPristine, PolicyError or InfrastructureError when the
    servers cannot be trusted or reached; finished cells are kept.
    """
    folder, run = plan.adapter.folder, settings.run_path
    digest = adapter_digest(check_adapter(folder)) if plan.holds == "both" else model_digest(check_model(folder))
    plan = plan.of_weights(digest)
    watchdog.beat(run / watchdog.HEARTBEAT, "eval-setup", adapter=plan.label)
    tasks = held_out_tasks(settings)
    client = PolicyClient(settings.policy_url)
    with engine_of(settings, plan, client, say) as engine:
        protocols = Protocols(run / "eval" / "protocols.json")
        protocol = protocols.add(describe(settings, client))
        jobs = make_jobs(tasks, settings.k_samples, protocol, digest, plan.label, settings.model, plan.served)
        mine = [job for job in jobs if plan.runs(job)]
        log = CellLog(run / "eval" / "cells.jsonl")
        finished, stale = log.graded(mine)
        for line in why_again(stale, protocols):
            say(line)
        if finished:
            say(f"{len(finished)} of {len(mine)} cells are taken from {log.path}")
        progress = Progress(run, mine, finished.values(), say)
        watchdog.beat(run / watchdog.HEARTBEAT, "eval", cells=progress.done, of=len(mine))

        def after(cell: Cell) -> None:
            progress.cell(cell)
            on_cell()

        fill(settings, [job for job in mine if job not in finished], log, after)
    if plan.holds == "base":
        return None
    cells = log.of(jobs)
    if missing := sum(job not in cells for job in jobs):
        raise InfrastructureError(f"{missing} base cells are missing: evaluate with the base in the engine first")
    base, other = ([cells[job] for job in jobs if job.model == model] for model in (BASE, plan.label))
    result = {"adapter_name": plan.label, "adapter_path": str(folder), "adapter_source": plan.adapter.source,
              "adapter_digest": digest, "protocol": protocol, "tasks": len(tasks),
              "tasks_digest": tasks_digest(tasks, settings.k_samples),
              "tasks_source": task_source.of_run(run, SPLIT), "time": time.time(),
              **report.compare(base, other), "seconds": phases.means([*base, *other]), "engine": engine,
              "settings": settings.as_dict()}
    watchdog.write_atomic(plan.out, json.dumps(result, indent=2) + "\n")
    return result


def fill(settings: Settings, jobs: Sequence[Job], log: CellLog, after: Callable[[Cell], None] = lambda cell: None
         ) -> None:
    """Runs `jobs` on the servers and writes each finished cell to `log`, then calls `after`. Raises
    InfrastructureError."""

    def keep(cell: Cell) -> None:
        log.append(cell)
        after(cell)

    run_cells(jobs, lambda job: run_eval_rollout(settings, SPLIT, job.index, job.served),
              concurrency=settings.eval_concurrency, retries=settings.eval_retries, on_cell=keep,
              healthy=lambda: eval_health.problem(settings))


def tasks_digest(tasks: Sequence[EvalTask], samples: int) -> str:
    """Names the tasks of an evaluation, their files and the number of samples."""
    return digests.of_values([samples, *([t.name, t.digest] for t in tasks)])


def ungraded(result: dict[str, Any]) -> int:
    return result["base"]["ungraded"] + result["adapter"]["ungraded"]
