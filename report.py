#!/usr/bin/env python3
"""Shows a run: tables in the terminal, curves as PNG, and one HTML page with its rollouts to read as conversations.

    python report.py runs/job-1                      a run folder, also of a run that is under way or crashed
    python report.py you/name                        a Hub repository with checkpoints and eval/
    python report.py you/name@1a2b3c --out somewhere
    python report.py runs/job-1 --steps 20           rollouts of the last 20 steps (default 5) and of the evaluation
    python report.py runs/job-1 --push you/name      also sends the report to report/job-1/ of the repository

Writes index.html, training.png, eval.png, metrics.jsonl and conversations.jsonl to RUN_DIR/report (a repository: to
report-<owner>-<name>). The page needs no network and runs no script. Tokens, session keys and whatever looks like a
credential are taken out of every text; read a page before you share it all the same.

Needs the trainer's environment: eval "$(bash setup.sh --local)" && "$TRAINER_PYTHON" report.py …
Exit codes: 0 ok · 64 nothing to report there, or wrong arguments · 69 the Hub could not be read or written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from recipe import hub, report, run_report
from recipe.adapters import AdapterError, Spec
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser, missing_package
from recipe.results_repo import OF_CHECKPOINT
from recipe.run_report import CONVERSATIONS, METRICS, NothingToReport, Run
from recipe.watchdog import write_atomic


def load(what: str, out: Path | None, last_steps: int) -> tuple[Run, Path]:
    """The run that `what` names, and the folder of its report."""
    if Path(what).is_dir():
        return run_report.of_folder(Path(what), last_steps), out or Path(what) / "report"
    try:
        spec = Spec.parse(what)
    except AdapterError:
        raise NothingToReport(f"{what!r} is neither a run folder nor owner/name[@revision]") from None
    out = out or Path(f"report-{spec.repo.replace('/', '-')}")
    return run_report.of_repo(spec.repo, spec.revision, out / "download"), out


def tables(run: Run, last_steps: int) -> list[tuple[str, str]]:
    """(heading, text) of what there is: training, its last steps, the learning curve, each evaluation."""
    parts = []
    if run.steps:
        parts.append(("Training", run_report.training_text(run.steps)))
        parts.append(("Last steps", run_report.step_table(run.steps[-max(last_steps, 1):])))
    if run.summary.get("checkpoints"):
        from eval_watch import render  # imports the env server's client, which takes seconds

        parts.append(("Learning curve", render(run.summary)))
    for name, result in run.results.items():
        if not OF_CHECKPOINT.fullmatch(f"{name}.json"):  # those are the learning curve's
            label = result.get("adapter_name", "adapter")
            parts.append((f"Evaluation ({name})", report.render(result, label)))
    return parts


def write(run: Run, parts: list[tuple[str, str]], out: Path) -> Path:
    """Writes the report's files; returns the page."""
    from recipe import plots, report_page

    out.mkdir(parents=True, exist_ok=True)
    images = []
    if run.steps:
        images.append(out / "training.png")
        plots.training_curves(run.steps, images[-1])
        write_atomic(out / METRICS, "".join(json.dumps(step) + "\n" for step in run.steps))
    curve = run_report.curve_of(run)
    if curve["checkpoints"]:
        images.append(out / "eval.png")
        plots.learning_curve(curve, images[-1])
    write_atomic(out / CONVERSATIONS, "".join(json.dumps(r) + "\n" for r in run.rollouts))
    page = report_page.render(run.name, parts, images, run.notes, run.rollouts)
    write_atomic(out / "index.html", page.encode(errors="replace").decode())
    return out / "index.html"


def push(out: Path, repo: str, name: str) -> None:
    """Sends the report to report/<name> of the repository, where `of_repo` finds it. Raises HubError."""
    from huggingface_hub import HfApi

    hub.repeat(lambda: HfApi().upload_folder(repo_id=repo, folder_path=out, path_in_repo=f"report/{name}",
                                             ignore_patterns="download/**", commit_message=f"Report of {name}"),
               repo, f"sending the report to {repo}")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("run", help="run folder, or owner/name[@revision] on the Hub")
    parser.add_argument("--out", type=Path, help="folder of the report")
    parser.add_argument("--steps", type=int, default=5, help="last training steps whose rollouts are shown (default 5)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="send the report of a run folder to this repository")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    if args.push and not Path(args.run).is_dir():
        parser.error("--push sends the report of a run folder")
    try:
        run, out = load(args.run, args.out, args.steps)
        parts = tables(run, args.steps)
        for heading, text in parts:
            print(f"\n{heading}\n\n{text}")
        page = write(run, parts, out)
        print("\n" + "\n".join([*run.notes, f"{len(run.rollouts)} rollouts to read: {page}"]))
        if args.push:
            push(out, args.push, run.name)
            print(f"sent to {args.push}, report/{run.name}")
    except NothingToReport as err:
        print(f"no report: {err}", file=sys.stderr)
        return EXIT_USAGE
    except hub.HubError as err:
        print(f"no report: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except OSError as err:
        print(f"no report: it cannot be written ({err}): name a folder that can with --out", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as err:
        print(missing_package(err), file=sys.stderr)
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
