#!/usr/bin/env python3
"""Held-out evaluation: every test task with the base model and with the adapter, on one policy server.

    RUN_DIR=runs/job-1 python eval_adapter.py                             # runs/job-1/adapter
    RUN_DIR=runs/job-1 python eval_adapter.py --adapter runs/job-1/checkpoints/checkpoint-100
    RUN_DIR=runs/job-1 python eval_adapter.py --holds base                # with LORA=0 twice, on two policy servers
    RUN_DIR=runs/job-1 python eval_adapter.py --holds trained             # … this one on runs/job-1/model

Needs a policy server that holds the pristine base (serve_policy.sh --mode eval) and an env server (serve_env.sh) on
the ports of the settings; run_job.sh and run_eval.sh start both. The adapter is hot-loaded under its own name and
unloaded at the end. A model whose weights were all trained (LORA=0) does not fit beside the base: the policy server
holds the base first, then that model (serve_policy.sh --weights), and the second run compares both. The engine's
weights are compared with the files of base and adapter before the first cell.

Writes, under RUN_DIR/eval: cells.jsonl (a line per finished cell; a second run goes on from it), final_results.json
(pass@1 of both with 95% intervals, agreement, exact McNemar p, tool calls, settings) and final_results.md; with
ADAPTER_REPO they also go to eval/ of that repository. K_SAMPLES rollouts of each task and model are run.

Exit codes: 0 every cell is graded · 2 cells stayed ungraded · 64 wrong settings or adapter · 69 a server does not
answer, serves other weights than asked, or rollouts fail in a row, or the results are not on the Hub (run the same
command again to go on).
"""

from __future__ import annotations

import sys
from pathlib import Path

from recipe.adapters import FINAL, Adapter, AdapterError
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_UNGRADED, EXIT_USAGE, Parser, packages_of
from recipe.hub import HubError

with packages_of(__name__):
    from recipe import report
    from recipe.cells import InfrastructureError
    from recipe.evaluation import Plan, evaluate, ungraded
    from recipe.policy_client import PolicyError
    from recipe.pristine import NotPristine
    from recipe.results_repo import ResultsRepo


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--adapter", type=Path, help="adapter or model folder (default: RUN_DIR/adapter or /model)")
    parser.add_argument("--holds", choices=("both", "base", "trained"), default="both", help="with a model: which of "
                        "the two the policy server holds")
    parser.add_argument("--source", default="", help="where it comes from, for the results (default: its folder)")
    parser.add_argument("--label", default="adapter", help="name of the adapter's cells in the results")
    parser.add_argument("--served-name", default="opencode-lora", help="begin of the name under which the "
                        "engine serves it; a digest of the weights follows")
    parser.add_argument("--results", default=FINAL, help="name of the results files in RUN_DIR/eval")
    args = parser.parse_args(argv)
    repo: ResultsRepo | None = None
    try:
        settings = Settings.load()
        out = settings.run_path / "eval" / f"{args.results}.json"
        folder = args.adapter or settings.final_path
        repo = ResultsRepo(settings.adapter_repo, out.parent, args.results)
        repo.push_on_sigterm()
        if restored := repo.restore():
            print(f"{restored} finished cells of an earlier start are taken from {settings.adapter_repo}", flush=True)
        served = args.served_name if args.holds == "both" else settings.model
        plan = Plan(Adapter(folder, args.source or str(folder)), args.label, served, out, args.holds)
        result = evaluate(settings, plan, repo.push_sometimes)
        if result is None:
            return 0
        table = report.render(result, args.label)
        out.with_suffix(".md").write_text(table + "\n")
        print(f"\n{table}\n\nresults: {out}", flush=True)
        repo.push(f"Evaluation: {args.results}")
        repo.finish()
    except (SettingsError, AdapterError, ValueError) as err:
        print(f"evaluation did not start: {err}", file=sys.stderr)
        return EXIT_USAGE
    except (InfrastructureError, NotPristine, PolicyError) as err:
        print(f"evaluation stopped: {err}\nFinished cells are kept; the same command goes on from them.",
              file=sys.stderr)
        if repo:
            repo.last_push("Evaluation stopped")
        return EXIT_UNAVAILABLE
    except HubError as err:
        print(err, file=sys.stderr)
        return EXIT_UNAVAILABLE
    if ungraded(result):
        print(f"{ungraded(result)} cells stayed ungraded after {settings.eval_retries + 1} attempts; reasons are in "
              f"{out.parent / 'cells.jsonl'}. The same command tries them again.", file=sys.stderr)
        return EXIT_UNGRADED
    return 0


if __name__ == "__main__":
    sys.exit(main())
