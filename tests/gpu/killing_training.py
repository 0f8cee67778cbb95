"""train_lora.py whose policy server is killed with kill -9 inside its sync KILL_AT, for TRAIN_SCRIPT of a job.

By NCCL: the engine has begun to receive, the trainer's broadcast has not begun. By CUDA IPC and by files: a moment
after the call by which the engine takes the weights over. RUN_DIR/killed has the time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
MOMENT = 0.001  # seconds; the engine's copies take 4 ms at 2.6B's shape


def kill_policy() -> None:
    run = Path(os.environ["RUN_DIR"])
    lines = (run / "processes").read_text().splitlines()
    pid = next(int(line.split()[0]) for line in lines if line.endswith(" policy"))
    (run / "killed").write_text(str(time.time()))
    os.killpg(pid, signal.SIGKILL)


def kill_inside(number: int) -> None:
    """Makes the transfer's calls to the policy server kill it in the `number`-th sync."""
    from recipe.weight_sync import HttpPhases

    call, syncs = HttpPhases._call, 0

    def killing(self: HttpPhases, method: str, route: str, **kwargs: Any) -> Any:
        nonlocal syncs
        what = kwargs.get("json", {}).get("method") or route
        way = getattr(self, "way", "file")
        if what == {"nccl": "flat_receive", "ipc": "flat_apply", "file": "/update_weights"}[way]:
            syncs += 1
            if syncs == number and way == "nccl":
                answer = call(self, method, route, **kwargs)
                kill_policy()
                return answer
            if syncs == number:
                threading.Timer(MOMENT, kill_policy).start()
        return call(self, method, route, **kwargs)

    HttpPhases._call = killing


if __name__ == "__main__":
    import train_lora

    kill_inside(int(os.environ["KILL_AT"]))
    sys.exit(train_lora.main())
