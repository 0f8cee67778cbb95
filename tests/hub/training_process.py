"""train_lora.main in a process group of its own, on rollouts that need no agent, and the traces that it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from slow_sessions import SlowSessions  # noqa: F401 (puts tests/trainer on the path)

from recipe import json_lines
from recipe.config import REPO

TASKS = 40

CHILD = """
    import os, sys
    from pathlib import Path
    sys.path[:0] = [{repo!r}, {repo!r} + "/tests/hub"]
    from slow_sessions import SlowSessions
    import train_lora

    if __name__ == "__main__":
        sessions = SlowSessions({engine!r}, tasks={tasks}, fates={fates}, log=Path({run!r}) / "sessions")
        real = train_lora.train
        train_lora.train = lambda settings, resume: real(settings, resume, sessions)
        sys.exit(train_lora.main([]))
"""


def start(folder: Path, engine: str, out: str = "out", environ: dict[str, str] | None = None,
          fates: dict[int, list[str]] | None = None, **settings: str) -> subprocess.Popen[str]:
    """The training of `folder`, a run folder that is made when it is not there; its output goes to folder/out.

    `settings` are environment variables; `environ` is what the process has beside them, `fates` how rollouts go.
    """
    from lfm2_small import local_settings

    folder.mkdir(exist_ok=True)
    base = local_settings(folder, save_steps=2, max_inflight=8)
    script = folder / "script.py"
    script.write_text(textwrap.dedent(CHILD.format(repo=str(REPO), engine=engine, tasks=TASKS, run=str(folder),
                                                   fates=fates or {})))
    inherited = {k: v for k, v in os.environ.items() if k != "TRACKIO_DIR"}
    return subprocess.Popen([sys.executable, str(script)], start_new_session=True, text=True,
                            env=inherited | base.environ() | settings | (environ or {}) | {
                                "POLICY_PORT": engine.rsplit(":", 1)[1], "OMP_NUM_THREADS": "1"},
                            stdout=(folder / out).open("w"), stderr=subprocess.STDOUT)


def trained(folder: Path, first_group: int, skip: int = 0) -> dict[int, int]:
    """Step -> number of the group in the run's order of tasks, from the lines of metrics.jsonl behind the `skip` first.

    A group's own number counts from the resumed checkpoint, whose position in the tasks is `first_group`.
    """
    return {line["step"]: first_group + line["group_rows"][0]["group"] for line in metrics(folder, skip)}


def left_out(folder: Path, skip: int = 0) -> dict[int, int]:
    """Step -> number of groups that were left out since the step before: stale ones, and those without a grade."""
    before, found = 0, {}
    for line in metrics(folder, skip):
        total = sum(line["skipped_groups"].values())
        found[line["step"]], before = total - before, total
    return found


def metrics(folder: Path, skip: int = 0) -> list[dict[str, Any]]:
    """The lines that are whole: this is also asked while one is being written."""
    return json_lines.read(folder / "metrics.jsonl")[skip:]
