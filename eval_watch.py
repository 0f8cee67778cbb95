#!/usr/bin/env python3
"""Evaluates every checkpoint as it appears and keeps the learning curve (run_eval_watch.sh starts the servers).

    RUN_DIR=runs/watch ADAPTER_REPO=you/name python eval_watch.py
    RUN_DIR=runs/watch python eval_watch.py --checkpoints runs/job-1/checkpoints

The newest checkpoint that has no result comes first and none is skipped; each is loaded into the running engine under
a name of its own and unloaded after. Base cells are computed once and taken from eval/cells.jsonl afterwards.

Writes eval/checkpoint-N_results.json for each, and eval/summary.json with all of them; with ADAPTER_REPO both also go
to the repository. Ends after the checkpoint of step MAX_STEPS, or EVAL_IDLE_LIMIT seconds after the last new one.
Exit codes: 0 ended by itself · 2 some cells stayed ungraded · 64 wrong settings · 69 servers fail or weights differ.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from recipe import report, watchdog
from recipe.adapters import AdapterError, Checkpoints, HubCheckpoints, LocalCheckpoints
from recipe.cells import InfrastructureError
from recipe.config import Settings, SettingsError
from recipe.evaluation import evaluate, ungraded
from recipe.exits import EXIT_UNAVAILABLE, EXIT_UNGRADED, EXIT_USAGE, Parser
from recipe.policy_client import PolicyError
from recipe.pristine import NotPristine


def results_file(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step}_results.json"


def summarize(folder: Path) -> dict:
    """The learning curve from the results files: checkpoints by step, each with the base it was compared with."""
    points = []
    for file in folder.glob("checkpoint-*_results.json"):
        result = json.loads(file.read_text())
        points.append({"step": int(file.name.split("-")[1].split("_")[0]), "base": result["base"],
                       "adapter": result["adapter"], "agreement": result["agreement"], "tasks": result["tasks"]})
    points.sort(key=lambda point: point["step"])
    return {"checkpoints": points, "base": points[-1]["base"] if points else None, "time": time.time()}


def render(summary: dict) -> str:
    rows = [[f"checkpoint-{p['step']}", report.percent(p["adapter"]), report.percent(p["base"]),
             report.number(p["adapter"]["mean_tool_calls"]), f"{p['agreement']['mcnemar_p']:.2g}",
             str(p["adapter"]["ungraded"])] for p in summary["checkpoints"]]
    return "\n".join(report.markdown_table(["", "pass@1", "base", "calls", "exact McNemar p", "ungraded"], rows))


def watch(settings: Settings, source: Checkpoints) -> int:
    """Evaluates until the last checkpoint or the idle limit; returns the number of cells that stayed ungraded."""
    folder = settings.run_path / "eval"
    last_new = time.monotonic()
    while True:
        watchdog.beat(settings.run_path / watchdog.HEARTBEAT, "eval-setup", waiting=True)
        waiting = [step for step in source.steps() if not results_file(folder, step).exists()]
        if waiting:
            step = waiting[-1]
            if len(waiting) > 1:
                print(f"{len(waiting)} checkpoints wait, newest first: {', '.join(map(str, reversed(waiting)))}",
                      flush=True)
            evaluate(settings, source.get(step), f"checkpoint-{step}", f"opencode-lora-{step}",
                     results_file(folder, step))
            summary = summarize(folder)
            watchdog.write_atomic(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
            print(f"\n{render(summary)}\n", flush=True)
            publish(settings, folder, step)
            last_new = time.monotonic()
            continue
        if results_file(folder, settings.max_steps).exists():
            print(f"checkpoint-{settings.max_steps} was the last one", flush=True)
            break
        if time.monotonic() - last_new > settings.eval_idle_limit:
            print(f"no new checkpoint for {settings.eval_idle_limit} s: ending (EVAL_IDLE_LIMIT)", flush=True)
            break
        time.sleep(settings.eval_poll)
    return sum(ungraded(json.loads(file.read_text())) for file in folder.glob("checkpoint-*_results.json"))


def publish(settings: Settings, folder: Path, step: int) -> None:
    """Sends results, summary and cells to the adapter repository; without one they stay in the run folder."""
    if not settings.adapter_repo:
        return
    from huggingface_hub import HfApi

    HfApi().upload_folder(repo_id=settings.adapter_repo, folder_path=folder, path_in_repo="eval",
                          commit_message=f"Evaluation of checkpoint-{step}")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoint-N folders (default: ADAPTER_REPO)")
    args = parser.parse_args(argv)
    try:
        settings = Settings.load()
        if not args.checkpoints and not settings.adapter_repo:
            raise SettingsError("name the checkpoints: set ADAPTER_REPO=owner/name or --checkpoints FOLDER")
        source = LocalCheckpoints(args.checkpoints) if args.checkpoints else HubCheckpoints(
            settings.adapter_repo, settings.run_path / "downloads")
        left = watch(settings, source)
    except (SettingsError, AdapterError, ValueError) as err:
        print(f"the watcher did not start: {err}", file=sys.stderr)
        return EXIT_USAGE
    except (InfrastructureError, NotPristine, PolicyError, OSError) as err:
        print(f"the watcher stopped: {err}\nFinished cells are kept; the same command goes on from them.",
              file=sys.stderr)
        return EXIT_UNAVAILABLE
    return EXIT_UNGRADED if left else 0


if __name__ == "__main__":
    sys.exit(main())
