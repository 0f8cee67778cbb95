"""Training and the watcher side by side; the watcher's whole job is killed with SIGKILL at random moments.

    eval "$(bash setup.sh --local --tests)"
    "$TRAINER_PYTHON" tests/hub/kill_watch.py --kills 10 --seed 0

Both are the real scripts (`bash run_job.sh --local`, `bash run_eval_watch.sh --local`) and know each other through a
double of the Hub alone. After a kill the same command is given again. At the end no finished cell was lost or run
twice, every checkpoint is in the curve with the weights that its manifest names and the figures that its cells give,
and the curve on the Hub grew checkpoint by checkpoint and is the one on disk. A broken rule raises Violation.
Prints one line a life. Exit code 0 when every rule held.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "e2e")]

from hub_double import HubDouble, hub_environ  # noqa: E402
from kill_often import Life, rule  # noqa: E402
from loopback import job_ports  # noqa: E402

from recipe import adapters, json_lines, report  # noqa: E402
from recipe.config import REPO  # noqa: E402

ADAPTER = "me/adapter"
LULL_S = 25.0  # the longest wait behind a cell, or behind a start: set-up and servers are killed too
LIMIT_S = 1800


class SideBySide:
    """One training of `steps` checkpoints and the watcher that evaluates each on `tasks` tasks."""

    def __init__(self, hub: HubDouble, folder: Path, steps: int, tasks: int, seed: int):
        self.hub, self.folder, self.steps, self.tasks, self.random = hub, folder, steps, tasks, random.Random(seed)
        self.cells = folder / "watch/eval/cells.jsonl"
        folder.mkdir(exist_ok=True)
        self.ports: dict[str, dict[str, str]] = {}
        self.lives: list[Life] = []
        self.kept: list[bytes] = []  # whole lines of cells.jsonl at each kill

    def run(self, kills: int) -> None:
        training = self.start("run_job.sh", "training", N_TASKS="1", SAVE_STEPS="1", NUM_GENERATIONS="2",
                              N_TRAIN_TASKS="4", MAX_INFLIGHT="2")
        watch = self.start_watch()
        try:
            while kills and self.kill_somewhere(watch):
                kills -= 1
                watch = self.start_watch()
            rule(watch.process.wait(LIMIT_S) == 0, f"the watcher ended badly; see {watch.log}")
            rule(training.process.wait(LIMIT_S) == 0, f"the training ended badly; see {training.log}")
        finally:
            for life in self.lives:
                life.kill()
        print(f"{len(self.lives) - 1:3} ended {len(self.finished()):4} cells", flush=True)
        self.check_end()

    def start_watch(self) -> Life:
        return self.start("run_eval_watch.sh", "watch", N_TASKS=str(self.tasks), EVAL_POLL="1")

    def start(self, script: str, name: str, **settings: str) -> Life:
        ports = self.ports.setdefault(name, job_ports())
        mark, run_dir, log = uuid.uuid4().hex, self.folder / name, self.folder / f"{name}.out"
        inherited = {k: v for k, v in os.environ.items() if k not in ("TRACKIO_DIR", "PRESET", "SETUP_TESTS")}
        process = subprocess.Popen(
            ["bash", script, "--local"], cwd=REPO, start_new_session=True, text=True, stdout=log.open("a"),
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=inherited | hub_environ(self.hub, self.folder / "home") | ports | settings | {
                "KILL_MARK": mark, "ADAPTER_REPO": ADAPTER, "RUN_DIR": str(run_dir), "MAX_STEPS": str(self.steps),
                "MAX_MODEL_CALLS": "2", "EVAL_CONCURRENCY": "2", "AGENT_TIMEOUT": "300"})
        self.lives.append(Life(run_dir, process, mark, log, 0, 0))
        return self.lives[-1]

    def finished(self) -> list[dict]:
        return json_lines.read(self.cells)

    def kill_somewhere(self, watch: Life) -> bool:
        """SIGKILL to all processes of the watcher a random time behind a random one of its next cells. False when it
        ended by itself before."""
        target = len(self.finished()) + self.random.randint(0, 2)
        extra, until = self.random.uniform(0, LULL_S), time.monotonic() + LIMIT_S
        while watch.process.poll() is None and (len(self.finished()) < target or extra > 0):
            rule(time.monotonic() < until, f"nothing happens; see {watch.log}")
            if len(self.finished()) >= target:
                extra -= 0.05
            time.sleep(0.05)
        if watch.process.poll() is not None:
            return False
        watch.kill()
        self.kept.append(self.cells.read_bytes().rpartition(b"\n")[0] if self.cells.exists() else b"")
        print(f"{len(self.lives) - 1:3} killed {len(self.finished()):3} cells {time.monotonic() - watch.born:7.1f} s",
              flush=True)
        return True

    def check_end(self) -> None:
        text = self.cells.read_bytes()
        rule(all(text.startswith(before) for before in self.kept), "a finished cell was lost")
        cells = [c for c in self.finished() if c["status"] != "ungraded"]
        names = {c["task"] for c in cells}
        models = ["base", *(f"checkpoint-{step}" for step in range(1, self.steps + 1))]
        rule(Counter((c["task"], c["model"]) for c in cells) == Counter(
            {(name, model): 1 for name in names for model in models}) and len(names) == self.tasks,
            "a cell is missing or was run twice")
        files = self.hub.repo(ADAPTER).files()
        summary = json.loads((self.cells.parent / "summary.json").read_text())
        rule(json.loads(files["eval/summary.json"]) == summary, "the Hub has another summary than the disk")
        rule(files["eval/learning_curve.png"].startswith(b"\x89PNG") and "eval/summary.md" in files, "no curve")
        rule([p["step"] for p in summary["checkpoints"]] == [*range(1, self.steps + 1)], "a checkpoint is not there")
        for point in summary["checkpoints"]:
            name = f"checkpoint-{point['step']}"
            of = {model: [c for c in cells if c["model"] == model] for model in ("base", name)}
            figures = report.compare(of["base"], of[name])
            rule(all(point[key] == figures[key] for key in ("base", "adapter", "agreement")), f"{name}: other figures")
            manifest = json.loads(files[f"{name}/manifest.json"])
            rule(point["adapter_digest"] == adapters.manifest_digest(manifest), f"{name}: other weights")
            rule(f"eval/{name}_results.json" in files, f"{name}: no results on the Hub")
        rule({"eval/final_results.json", "eval/final_results.md", "eval/final_results_cells.jsonl"} <= files.keys(),
             "the training's own evaluation is not on the Hub")
        curves = [commit.tree.get("eval/summary.json") for commit in self.hub.repo(ADAPTER).commits]
        lengths = [len(json.loads(curve)["checkpoints"]) for curve in curves if curve]
        rule(lengths == sorted(lengths) and {*lengths} == {*range(1, self.steps + 1)},
             f"the curve did not grow checkpoint by checkpoint: {lengths}")


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4, help="checkpoints")
    parser.add_argument("--tasks", type=int, default=3, help="held-out tasks of each")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="recipe-watch-"))
    folder.chmod(0o755)  # under proot the agent runs as nobody and has to be able to enter
    kills = runs = 0
    while kills < args.kills:  # a run may be through before
        runs += 1
        with HubDouble() as hub:
            both = SideBySide(hub, folder / str(runs), args.steps, args.tasks, args.seed + runs - 1)
            both.run(args.kills - kills)
        kills += len(both.kept)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{kills} kills in {runs} runs: every rule held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
