"""The whole loop: seconds a step, rollouts a minute, how idle each GPU is, and what 1,000 steps cost.

    python3 -m bench.loop --run "MAX_STEPS=20 bash run_job.sh --local"      runs it, watching the GPUs
    python3 -m bench.loop --run-dir runs/local-…                             reads a finished run (no GPU figures)

The command gets RUN_DIR; settings stand before it or in the environment. Idle is the share of samples (4 a second, from
nvidia-smi, while steps are trained) in which no kernel ran in the last sampling period, so it is an upper bound on use.
Times of a step are those of metrics.jsonl, the first steps left out: `wait` for rollouts, `train`, `sync`.
Prices: h200 $5 an hour, h200x2 $10 (https://huggingface.co/docs/hub/jobs-pricing).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.common import parser, report
from recipe.config import REPO

PRICES = {1: 5.0, 2: 10.0}  # dollars an hour by GPUs
WARM = 3  # steps until the queue of rollouts is full


class Watch:
    """Samples (time, busy %) of each GPU until stopped."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[int]]] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.ended.wait(0.25):
            done = subprocess.run(["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"],
                                  capture_output=True, text=True)
            if done.returncode == 0:
                self.samples.append((time.time(), [int(v) for v in done.stdout.split() if v.isdigit()]))

    def between(self, begin: float, end: float) -> list[dict[str, float]]:
        """For each GPU the share of idle samples and the mean use."""
        inside = [busy for at, busy in self.samples if begin <= at <= end and busy]
        return [{"idle %": round(100 * sum(b[g] == 0 for b in inside) / len(inside), 1),
                 "mean busy %": round(statistics.mean(b[g] for b in inside), 1)}
                for g in range(len(inside[0]))] if inside else []


def read_steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(steps: list[dict[str, Any]], gpus: int) -> dict[str, Any]:
    """The row of one run, from step WARM on where there are so many."""
    steady = steps[WARM:] if len(steps) > 2 * WARM else steps

    def mean(values: list[float]) -> float:
        return statistics.mean(values) if values else float("nan")

    def trl(name: str) -> float:
        return mean([s["trl"][name] for s in steady if name in s.get("trl", {})])

    seconds = mean([s["seconds"] for s in steady])
    ratios = [s["fresh_ratio_mean"] for s in steady if s.get("fresh_ratio_mean") is not None]
    return {"steps": len(steps), "s a step": round(seconds, 2),
            "rollouts a minute": round(60 * mean([s["rollouts"] for s in steady]) / seconds, 1),
            "tokens a step": round(mean([s["tokens"] for s in steady])), "sync s": round(trl("perf/weight_sync_s"), 3),
            "paused s": round(trl("sync/paused_s"), 3),
            "reward first, last": f"{mean([s['reward_mean'] for s in steps[:5]]):.3f}, "
                                  f"{mean([s['reward_mean'] for s in steps[-5:]]):.3f}",
            "ratio of fresh rows": f"{min(ratios):.5f} to {max(ratios):.5f}" if ratios else "none were fresh",
            "$ for 1,000 steps": round(1000 * seconds / 3600 * PRICES[gpus], 2)}


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", metavar="COMMAND", help="the job, run by bash in the repository")
    what.add_argument("--run-dir", type=Path, help="a finished run")
    options.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="for the price")
    args = options.parse_args(argv)
    idle: list[dict[str, float]] = []
    code = 0
    run = args.run_dir
    if args.run:
        run = Path(os.environ.get("RUN_DIR") or tempfile.mkdtemp(prefix="bench-loop-"))
        watch = Watch()
        code = subprocess.run(["bash", "-c", args.run], cwd=REPO, env=os.environ | {"RUN_DIR": str(run),
                                                                                    "GPUS": str(args.gpus)}).returncode
        watch.ended.set()
    steps = read_steps(run) if (run / "metrics.jsonl").exists() else []
    if not steps:
        print(f"no step was trained in {run} (the command ended with {code})", file=sys.stderr)
        return 1
    if args.run:
        idle = watch.between(steps[min(WARM, len(steps) - 1)]["time"], steps[-1]["time"])
    row = {"GPUs": args.gpus} | figures(steps, args.gpus)
    for number, gpu in enumerate(idle):
        row |= {f"GPU {number} {name}": value for name, value in gpu.items()}
    report("loop", args, [row], run_dir=str(run), exit_code=code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
