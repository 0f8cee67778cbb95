#!/usr/bin/env python3
"""Cells a minute of an evaluation, base and adapter side by side, against a plain loop; and where their time goes.

    EVAL_SCRIPT=bench/eval_throughput.py N_TASKS=16 bash run_eval.sh --adapter you/name
    EVAL_SCRIPT=bench/eval_throughput.py N_TASKS=4 bash run_eval.sh --local --adapter runs/local-…/adapter

run_eval.sh starts the servers; then the same cells (N_TASKS tasks, base and adapter) are run twice on them, one after
the other and EVAL_CONCURRENCY at once, after one cell that is not counted. Prints a table and writes
RUN_DIR/eval/throughput.json. Seconds are means a cell; `other` is what a cell waits for beside its phases: the env
server, and the export of its tokens. Model calls overlap, so the engine can be busy for more than the time that passed.
Exit codes: 0 measured · 64 wrong settings or adapter · 69 a server fails, or a cell did not run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipe import phases, report  # noqa: E402
from recipe.adapters import Adapter, AdapterError, adapter_digest, check_adapter  # noqa: E402
from recipe.cells import CellLog, InfrastructureError, Job, finish  # noqa: E402
from recipe.config import Settings, SettingsError  # noqa: E402
from recipe.evaluation import SPLIT, Plan, engine_of, fill, held_out_tasks, make_jobs  # noqa: E402
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser  # noqa: E402
from recipe.harbor_sessions import run_eval_rollout  # noqa: E402
from recipe.policy_client import PolicyClient, PolicyError  # noqa: E402
from recipe.pristine import NotPristine  # noqa: E402
from recipe.redact import Redactor, stored_token  # noqa: E402
from recipe.watchdog import write_atomic  # noqa: E402


def one_by_one(settings: Settings, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The plain loop: a cell begins when the one before it has ended."""
    clean = Redactor(stored_token())
    return [asdict(finish(job, run_eval_rollout(settings, SPLIT, job.index, job.served), 1, clean)) for job in jobs]


def side_by_side(settings: Settings, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """As an evaluation runs them."""
    log = CellLog(settings.run_path / "eval" / "throughput_cells.jsonl")
    log.path.unlink(missing_ok=True)
    fill(settings, jobs, log)
    return log.read()


def measure(cells: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What `cells` cost that took `seconds` altogether. Raises InfrastructureError when one of them did not run."""
    if lost := [c for c in cells if c["status"] == "ungraded"]:
        raise InfrastructureError(f"{len(lost)} of {len(cells)} cells did not run, so nothing is measured; the first: "
                                  f"{lost[0]['reason']}")
    spent = phases.means(cells)
    return {"cells": len(cells), "seconds": seconds, "cells_per_minute": 60 * len(cells) / seconds,
            "seconds_a_cell": spent, "tokens_per_second": sum(c["tokens"] for c in cells) / seconds,
            "mean_calls_under_way": spent.get("model", 0.0) * len(cells) / seconds}


def table(found: dict[str, dict[str, Any]]) -> str:
    names = (*phases.NAMES, "other")
    rows = [[name, f"{m['cells_per_minute']:.2f}", f"{m['tokens_per_second']:.1f}", f"{m['mean_calls_under_way']:.2f}",
             *(f"{m['seconds_a_cell'].get(key, 0):.2f}" for key in names)] for name, m in found.items()]
    return "\n".join(report.markdown_table(
        ["", "cells/min", "tokens/s", "model calls at once", *(f"{name} s" for name in names)], rows))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--adapter", type=Path, required=True, help="adapter folder")
    parser.add_argument("--source", help="ignored, as run_eval.sh passes it")
    parser.add_argument("--results", help="ignored, as run_eval.sh passes it")
    folder = parser.parse_args(argv).adapter
    try:
        settings = Settings.load()
        out = settings.run_path / "eval" / "throughput.json"
        digest = adapter_digest(check_adapter(folder))
        client = PolicyClient(settings.policy_url)
        plan = Plan(Adapter(folder, str(folder)), "adapter", "opencode-lora", out).of_weights(digest)
        jobs = make_jobs(held_out_tasks(settings), 1, "bench", digest, plan.label, settings.model, plan.served)
        found = {}
        with engine_of(settings, plan, client, print):
            one_by_one(settings, jobs[:1])  # what only the first rollout pays for
            for name, run in (("one by one", one_by_one), (f"{settings.eval_concurrency} at once", side_by_side)):
                print(f"{len(jobs)} cells, {name}", flush=True)
                started = time.monotonic()
                cells = run(replace(settings, eval_retries=0), jobs)
                found[name] = measure(cells, time.monotonic() - started)
    except (SettingsError, AdapterError, ValueError) as err:
        print(f"nothing was measured: {err}", file=sys.stderr)
        return EXIT_USAGE
    except (InfrastructureError, NotPristine, PolicyError) as err:
        print(f"nothing was measured: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    first, second = found.values()
    ratio = second["cells_per_minute"] / first["cells_per_minute"]
    result = {"speed_up": ratio, "cores": os.cpu_count(), "runs": found,
              "settings": settings.as_dict()}
    write_atomic(out, json.dumps(result, indent=2) + "\n")
    print(f"\n{table(found)}\n\n{ratio:.2f} times the plain loop; {out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
