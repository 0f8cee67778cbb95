"""Writes the tasks of a run to $RUN_DIR/tasks/{train,test}, pinned and checked.

    RUN_DIR=runs/a python prepare_tasks.py             # the recipe's tasks, from the Hub (data/*.json)
    RUN_DIR=runs/a python prepare_tasks.py --local     # generated tasks, no network
    python prepare_tasks.py --local --out /tmp/tasks --split test
    RUN_DIR=runs/a python prepare_tasks.py --subset 20 # 20 of each split, the difficulties in their shares
    RECIPE=deepcoder RUN_DIR=runs/a python prepare_tasks.py    # problems of DATASET (recipe/deepcoder.py)

Each task appears as a whole or not at all, and what is there already is checked and kept: an interrupted run is
continued by the same command. $RUN_DIR/tasks/<split>.json lists the tasks in the recipe's order.
Exit codes: 0 ok, 64 wrong settings, 69 a task could not be fetched or is not the pinned one.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recipe import deepcoder, disk, hub, hub_tasks, local_tasks, subset
from recipe.config import REPO, Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser, missing_package
from recipe.watchdog import write_atomic

SPLITS = ("train", "test")
DOWNLOADS = 16  # at once
PROGRESS = 10.0  # seconds between two lines that say how far it is

Load = Callable[[], dict[str, bytes]]  # all files of one task: relative path -> content


def made_here(name: str, files: dict[str, str]) -> tuple[str, Load]:
    return name, lambda: {path: text.encode() for path, text in files.items()}


def local_source(split: str, n: int, seed: int) -> list[tuple[str, Load]]:
    try:
        return [made_here(task.name, local_tasks.files(task)) for task in local_tasks.generate(split, n, seed)]
    except ValueError as err:
        raise SettingsError(f"{err}: lower {'N_TRAIN_TASKS' if split == 'train' else 'N_TASKS'}.") from None


def deepcoder_source(settings: Settings, split: str, n: int) -> list[tuple[str, Load]]:
    n_train, n_test = (n, settings.n_tasks) if split == "train" else (settings.n_train_tasks, n)
    problems = deepcoder.choose(deepcoder.rows_of(settings), split, n_train, n_test, settings.seed)
    return [made_here(problem.name, deepcoder.files(problem)) for problem in problems]


def hub_source(pinned: hub_tasks.TaskList, n: int, fetch: hub_tasks.Fetch | None = None, seed: int = 0
               ) -> list[tuple[str, Load]]:
    """`n` tasks of the list in its order, each difficulty in its share; `seed` chooses which. `fetch` is a seam for
    the tests. Raises SettingsError when `n` is too large."""
    if n > len(pinned.tasks):
        raise SettingsError(f"{n} tasks are asked of {pinned.dataset}, the pinned list has {len(pinned.tasks)}: lower "
                            "N_TRAIN_TASKS or N_TASKS.")
    chosen = subset.stratified(pinned.tasks, n, lambda t: t.name, lambda t: t.difficulty, seed=seed)
    fetch = fetch or hub_tasks.hub_fetch(pinned.dataset, pinned.revision)
    return [(task.name, lambda task=task: hub_tasks.load_hub_task(task, fetch, pinned.grader)) for task in chosen]


def write_task(folder: Path, contents: dict[str, bytes], part: Path) -> bool:
    """Makes `folder` hold exactly `contents`, atomically through `part`. Returns False when it already did."""
    if folder.is_dir():
        there = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        if there == contents:
            return False
        shutil.rmtree(folder)
    shutil.rmtree(part, ignore_errors=True)
    for relative, content in contents.items():
        path = part / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    part.rename(folder)
    return True


def materialize(split: str, tasks: Iterable[tuple[str, Load]], out: Path, source: str = "") -> tuple[int, int]:
    """Writes the tasks to out/split, removes other tasks there, and lists them with their source (recipe/task_source.py
    reads it). Returns (all, newly written)."""
    tasks = list(tasks)
    folder, parts, listing = out / split, out / f".{split}.part", out / f"{split}.json"
    folder.mkdir(parents=True, exist_ok=True)
    listing.unlink(missing_ok=True)  # it says that all are there

    def write(task: tuple[str, Load]) -> bool:
        return write_task(folder / task[0], task[1](), parts / task[0])

    with ThreadPoolExecutor(DOWNLOADS) as pool:
        jobs = [pool.submit(write, task) for task in tasks]
        written, told = 0, time.monotonic()
        try:
            for done, job in enumerate(jobs, 1):
                written += job.result()
                if (now := time.monotonic()) - told > PROGRESS:
                    told = now
                    print(f"[tasks] {split}: {done} of {len(jobs)}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # the first failure is told at once
            raise
    names = [name for name, _ in tasks]
    for other in folder.iterdir():
        if other.name not in names and (other / "task.toml").is_file():
            shutil.rmtree(other)
    shutil.rmtree(parts, ignore_errors=True)
    write_atomic(listing, json.dumps({"split": split, "source": source, "tasks": names}, indent=1) + "\n")
    return len(names), written


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--local", action="store_true", help="use the local preset: generated tasks, no network")
    parser.add_argument("--split", choices=SPLITS, action="append", help="only this split (default: both)")
    parser.add_argument("--out", type=Path, help="folder to write to (default: $RUN_DIR/tasks)")
    parser.add_argument("--subset", type=int, metavar="N", help="tasks of each split (default: N_TRAIN_TASKS, N_TASKS)")
    args = parser.parse_args(argv)
    if args.subset is not None and args.subset < 1:
        parser.error(f"--subset {args.subset}: must be at least 1")
    try:
        settings = Settings.load(preset="local" if args.local else None)
        out = args.out or settings.run_path / "tasks"
        lists = {}
        if settings.recipe == "smoldataenvs" and settings.preset != "local":
            lists = {split: hub_tasks.TaskList.read(REPO / "data" / f"{split}.json") for split in SPLITS}
            hub_tasks.check_disjoint(*lists.values())
        for split in args.split or SPLITS:
            n = args.subset or (settings.n_train_tasks if split == "train" else settings.n_tasks)
            if settings.recipe == "deepcoder":
                source, tasks = f"{settings.dataset}, seed {settings.seed}", deepcoder_source(settings, split, n)
            elif settings.preset == "local":
                source, tasks = f"generated, seed {settings.seed}", local_source(split, n, settings.seed)
            else:
                # The held-out tasks are the same in every run; SEED chooses among the training tasks only.
                pinned, seed = lists[split], settings.seed if split == "train" else 0
                source, tasks = f"{pinned.dataset}@{pinned.revision}", hub_source(pinned, n, seed=seed)
            total, new = materialize(split, tasks, out, source)
            print(f"[tasks] {split}: {total} tasks ({new} new, {total - new} unchanged) in {out / split}; {source}",
                  flush=True)
    except SettingsError as err:
        print(f"Settings are wrong, no task was written:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as err:
        print(missing_package(err), file=sys.stderr)
        return EXIT_UNAVAILABLE
    except (hub_tasks.TaskError, hub.HubError, OSError) as err:
        again = shlex.join(["python", "prepare_tasks.py", *(sys.argv[1:] if argv is None else argv)])
        if disk.is_full(err):
            print(disk.advice(out), file=sys.stderr)
        print(f"[tasks] ERROR: {err}\nTasks written so far are kept; continue with: {again}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
