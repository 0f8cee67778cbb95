#!/usr/bin/env python3
"""Evaluates every checkpoint as it appears and keeps the learning curve (run_eval_watch.sh starts the servers).

    RUN_DIR=runs/watch ADAPTER_REPO=you/name python eval_watch.py
    RUN_DIR=runs/watch python eval_watch.py --checkpoints runs/job-1/checkpoints

The newest checkpoint that has no result comes first and none is skipped; each is loaded into the running engine under
a name of its own and unloaded after. Base cells are computed once and taken from eval/cells.jsonl afterwards. A new
start goes on where the last one was, on an empty disk from what that one had pushed; results of other settings, tasks
or weights are made again, and cells that stayed ungraded tried again.

Writes eval/checkpoint-N_results.json for each, and with all of them eval/summary.json, the table summary.md and the
curve learning_curve.png; with ADAPTER_REPO they also go to the repository. Ends after the checkpoint of step MAX_STEPS,
or EVAL_IDLE_LIMIT seconds after the last new one.
Exit codes: 0 ended by itself · 2 some cells stayed ungraded · 64 wrong settings · 69 servers or the Hub fail, or
weights differ.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from recipe import hub, watchdog
from recipe.adapters import Adapter, AdapterError, Checkpoints, HubCheckpoints, LocalCheckpoints
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_UNGRADED, EXIT_USAGE, Parser, packages_of

with packages_of(__name__):
    from recipe import plots, report
    from recipe.cells import InfrastructureError
    from recipe.evaluation import Plan, evaluate, held_out_tasks, tasks_digest, ungraded
    from recipe.policy_client import PolicyClient, PolicyError
    from recipe.pristine import NotPristine
    from recipe.protocol import Protocols, describe
    from recipe.results_repo import OF_CHECKPOINT, ResultsRepo


class Terms(NamedTuple):
    """Under which a result belongs to this curve: digests of the protocol and of the tasks."""

    protocol: str
    tasks_digest: str


def terms_of(settings: Settings) -> Terms:
    protocols = Protocols(settings.run_path / "eval" / "protocols.json")
    return Terms(protocols.add(describe(settings, PolicyClient(settings.policy_url))),
                 tasks_digest(held_out_tasks(settings), settings.k_samples))


def results_file(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step}_results.json"


def read_results(folder: Path, terms: Terms) -> dict[int, dict[str, Any]]:
    """Step -> result of every checkpoint that was evaluated under `terms`, ascending."""
    found = {}
    for file in folder.glob("checkpoint-*"):
        if match := OF_CHECKPOINT.fullmatch(file.name):
            result = json.loads(file.read_text())
            if Terms(result.get("protocol", ""), result.get("tasks_digest", "")) == terms:
                found[int(match[1])] = result
    return dict(sorted(found.items()))


def summarize(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The learning curve: checkpoints by step, each with the base it was compared with."""
    points = [{"step": step, "base": r["base"], "adapter": r["adapter"], "agreement": r["agreement"],
               "tasks": r["tasks"], "adapter_source": r["adapter_source"], "adapter_digest": r["adapter_digest"]}
              for step, r in results.items()]
    return {"checkpoints": points, "base": points[-1]["base"] if points else None,
            "time": max((r["time"] for r in results.values()), default=None)}


def render(summary: dict[str, Any]) -> str:
    rows = [[f"checkpoint-{p['step']}", report.percent(p["adapter"]), report.percent(p["base"]),
             report.number(p["adapter"]["mean_tool_calls"]), f"{p['agreement']['mcnemar_p']:.2g}",
             str(p["adapter"]["ungraded"])] for p in summary["checkpoints"]]
    return "\n".join(report.markdown_table(["", "pass@1", "base", "calls", "exact McNemar p", "ungraded"], rows))


class Watch:
    """One watcher: what it has seen of `source` and which checkpoints it evaluates next."""

    def __init__(self, settings: Settings, source: Checkpoints, repo: ResultsRepo):
        self.settings, self.source, self.repo = settings, source, repo
        self.folder = settings.run_path / "eval"
        self.terms = terms_of(settings)
        self.tried: set[tuple[int, str]] = set()  # (step, adapter) that this start has evaluated
        self.told: dict[int, str] = {}  # step -> what was said to be wrong with it
        self.broken: dict[tuple[int, str], str] = {}  # whole by their manifest, and no adapter
        self.lost: hub.HubError | None = None

    def run(self) -> int:
        """Evaluates until the last checkpoint or the idle limit; returns the number of cells that stayed ungraded."""
        if read_results(self.folder, self.terms):  # the last start may have ended between a result and its summary
            write_summary(self.folder, self.terms)
            self.repo.push("Evaluation so far")
        limit, last_new = self.settings.eval_idle_limit, time.monotonic()
        while True:
            watchdog.beat(self.settings.run_path / watchdog.HEARTBEAT, "eval-setup", waiting=True)
            found = self.look()
            waiting = self.waiting(found)
            if waiting and self.next(waiting, found[waiting[0]]):
                last_new = time.monotonic()
                continue
            if not waiting and self.settings.max_steps in found:
                self.say(f"checkpoint-{self.settings.max_steps} was the last one")
                break
            if time.monotonic() - last_new > limit:
                if self.lost:
                    raise self.lost
                self.say(f"no new checkpoint for {limit} s: ending (EVAL_IDLE_LIMIT)")
                break
            time.sleep(self.settings.eval_poll)
        broken = {step: why for (step, _), why in self.broken.items()}
        for step, wrong in sorted((self.source.incomplete | broken).items()):
            self.say(f"WARN checkpoint-{step} was not evaluated: {wrong}")
        return sum(map(ungraded, read_results(self.folder, self.terms).values()))

    def look(self) -> dict[int, str]:
        """The whole checkpoints; none while the Hub can't be reached. Raises HubError when it refuses."""
        try:
            found, self.lost = self.source.look(), None
        except hub.HubError as err:
            if err.final:
                raise
            self.say(f"WARN {err}")
            found, self.lost = {}, err
        for step, wrong in self.source.incomplete.items():
            if self.told.get(step) != wrong:
                self.say(f"checkpoint-{step} is not whole yet: {wrong}")
        self.told = dict(self.source.incomplete)
        return {step: digest for step, digest in found.items() if (step, digest) not in self.broken}

    def waiting(self, found: dict[int, str]) -> list[int]:
        """Steps to evaluate, the newest first; before those that only have ungraded cells left."""
        results = read_results(self.folder, self.terms)
        new = [step for step, digest in found.items() if results.get(step, {}).get("adapter_digest") != digest]
        again = [step for step, digest in found.items() if step not in new and (step, digest) not in self.tried
                 and ungraded(results[step])]
        return sorted(new, reverse=True) + sorted(again, reverse=True)

    def next(self, waiting: list[int], digest: str) -> bool:
        """Evaluates the first of `waiting`, whose adapter is `digest`; False when it could not be fetched."""
        if len(waiting) > 1:
            self.say(f"{len(waiting)} checkpoints wait, newest first: {', '.join(map(str, waiting))}")
        step = waiting[0]
        try:
            adapter = self.source.get(step)
        except AdapterError as err:
            self.broken[step, digest] = str(err)
            self.say(f"WARN checkpoint-{step} is passed over: {err}")
            return False
        except hub.HubError as err:
            self.say(f"WARN {err}")
            return False
        self.tried.add((step, digest))
        self.evaluate(step, adapter)
        return True

    def evaluate(self, step: int, adapter: Adapter) -> None:
        evaluate(self.settings, Plan(adapter, f"checkpoint-{step}", f"opencode-lora-{step}",
                                     results_file(self.folder, step)), self.repo.push_sometimes)
        summary = write_summary(self.folder, self.terms)
        self.say(f"\n{render(summary)}\n")
        self.repo.push(f"Evaluation of checkpoint-{step}")

    def say(self, text: str) -> None:
        print(text, flush=True)


def write_summary(folder: Path, terms: Terms) -> dict[str, Any]:
    """summary.json, summary.md and learning_curve.png of all results in `folder`."""
    summary = summarize(read_results(folder, terms))
    watchdog.write_atomic(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    watchdog.write_atomic(folder / "summary.md", render(summary) + "\n")
    plots.learning_curve(summary, folder / "learning_curve.png")
    return summary


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoint-N folders (default: ADAPTER_REPO)")
    args = parser.parse_args(argv)
    repo: ResultsRepo | None = None
    try:
        settings = Settings.load()
        if not args.checkpoints and not settings.adapter_repo:
            raise SettingsError("name the checkpoints: set ADAPTER_REPO=owner/name or --checkpoints FOLDER")
        source = LocalCheckpoints(args.checkpoints) if args.checkpoints else HubCheckpoints(
            settings.adapter_repo, settings.run_path / "downloads")
        repo = ResultsRepo(settings.adapter_repo, settings.run_path / "eval", "watch")
        repo.push_on_sigterm()
        if restored := repo.restore():
            print(f"{restored} finished cells of an earlier start are taken from {settings.adapter_repo}", flush=True)
        left = Watch(settings, source, repo).run()
        repo.finish()
    except (SettingsError, AdapterError, ValueError) as err:
        print(f"the watcher did not start: {err}", file=sys.stderr)
        return EXIT_USAGE
    except (InfrastructureError, NotPristine, PolicyError, hub.HubError, OSError) as err:
        print(f"the watcher stopped: {err}\nFinished cells are kept; the same command goes on from them.",
              file=sys.stderr)
        if repo:
            repo.last_push("Evaluation stopped")
        return EXIT_UNAVAILABLE
    return EXIT_UNGRADED if left else 0


if __name__ == "__main__":
    sys.exit(main())
