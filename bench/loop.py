"""The whole loop: seconds a step, rollouts a minute, how idle each GPU is, and what 1,000 steps cost.

    python3 -m bench.loop --run "MAX_STEPS=20 bash run_job.sh --local"      runs it, watching the GPUs
    python3 -m bench.loop --run-dir runs/local-…                             reads a finished run (no GPU figures)

The command gets RUN_DIR; settings stand before it or in the environment. A signal is passed on to it, and a job that
was ended has figures all the same: of the steps that it trained. Idle is the share of samples (4 a second, from
nvidia-smi, while steps are trained) in which no kernel ran in the last sampling period, so it is an upper bound on use;
with CUDA_VISIBLE_DEVICES only those GPUs are watched. Without nvidia-smi there are no such figures, and the job runs on
the CPU engine. Times of a step are those of metrics.jsonl, the first steps left out: `waiting` for rollouts, `forward
and backward`, `sync`.
Prices: h200 $5 an hour, h200x2 $10 (https://huggingface.co/docs/hub/jobs-pricing).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.common import parser, report
from recipe import json_lines
from recipe.config import REPO

PRICES = {1: 5.0, 2: 10.0}  # dollars an hour by GPUs
WARM = 3  # steps until the queue of rollouts is full


class Watch:
    """Samples (time, {GPU: busy %}) until stopped; none where there is no nvidia-smi."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, dict[str, int]]] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        if not shutil.which("nvidia-smi"):
            print("no nvidia-smi here: the GPUs, if there are any, are not watched", file=sys.stderr)
            return
        command = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits"]
        if os.environ.get("CUDA_VISIBLE_DEVICES"):
            command.append(f"--id={os.environ['CUDA_VISIBLE_DEVICES']}")
        while not self.ended.wait(0.25):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                self.samples.append((time.time(), {gpu: int(busy) for gpu, busy in (
                    line.split(", ") for line in done.stdout.splitlines()) if busy.isdigit()}))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """For each GPU the share of idle samples and the mean use."""
        inside = [busy for at, busy in self.samples if begin <= at <= end and busy]
        found = {}
        for gpu in inside[0] if inside else ():
            use = [busy[gpu] for busy in inside if gpu in busy]
            found[f"GPU {gpu} idle %"] = round(100 * sum(u == 0 for u in use) / len(use), 1)
            found[f"GPU {gpu} mean busy %"] = round(statistics.mean(use), 1)
        return found


def run_job(command: str, run: Path, gpus: int) -> int:
    """Exit code of the job; it gets the signals that this process gets."""
    process = subprocess.Popen(["bash", "-c", command], cwd=REPO, process_group=0,
                               env=os.environ | {"RUN_DIR": str(run), "GPUS": str(gpus)})

    def pass_on(number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    return process.wait()


def weights_by(run: Path) -> str | None:
    """What the trainer says of the engine and of the way to it; None where that is no vLLM."""
    log = run / "logs" / "train.log"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("weights to vLLM")] \
        if log.exists() else []
    return said[-1].removeprefix("weights to ") if said else None


def figures(steps: list[dict[str, Any]], gpus: int) -> dict[str, Any]:
    """The row of one run: times from step WARM on where there are so many, rewards and ratios of all steps."""
    steady = steps[WARM:] if len(steps) > 2 * WARM else steps

    def mean(values: list[float]) -> float:
        return statistics.mean(values) if values else float("nan")

    def trl(name: str) -> float:
        return mean([s["trl"][name] for s in steady if name in s.get("trl", {})])

    seconds = mean([s["seconds"] for s in steady])
    ratios = [s["fresh_ratio_mean"] for s in steps if s.get("fresh_ratio_mean") is not None]
    return {"steps": len(steps), "s a step": round(seconds, 2),
            "rollouts a minute": round(60 * mean([s["rollouts"] for s in steady]) / seconds, 1),
            "tokens a step": round(mean([s["tokens"] for s in steady])),
            "waiting s": round(trl("perf/rollout_wait_s"), 2),
            "forward and backward s": round(trl("perf/fwd_bwd_s"), 2), "sync s": round(trl("perf/weight_sync_s"), 3),
            "paused s": round(trl("sync/paused_s"), 3),
            "reward first, last": f"{mean([s['reward_mean'] for s in steps[:5]]):.3f}, "
                                  f"{mean([s['reward_mean'] for s in steps[-5:]]):.3f}",
            "ratio of fresh rows": f"{min(ratios):.5f} to {max(ratios):.5f}" if ratios else "none were fresh",
            "$ for 1,000 steps": round(1000 * seconds / 3600 * PRICES[gpus], 2)}


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, model=False)
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", metavar="COMMAND", help="the job, run by bash in the repository")
    what.add_argument("--run-dir", type=Path, help="a finished run")
    options.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="for the price")
    args = options.parse_args(argv)
    idle: dict[str, float] = {}
    code = 0
    run = args.run_dir
    if args.run:
        run = Path(os.environ.get("RUN_DIR") or tempfile.mkdtemp(prefix="bench-loop-"))
        watch = Watch()
        code = run_job(args.run, run, args.gpus)
        watch.ended.set()
    steps = json_lines.read(run / "metrics.jsonl")
    if not steps:
        print(f"no step was trained in {run} (the command ended with {code})", file=sys.stderr)
        return 1
    if args.run:
        idle = watch.between(steps[min(WARM, len(steps) - 1)]["time"], steps[-1]["time"])
    row = {"GPUs": args.gpus} | figures(steps, args.gpus) | idle
    report("loop", args, [row], run_dir=str(run), exit_code=code, weights_to=weights_by(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
