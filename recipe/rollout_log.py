"""RUN_DIR/rollouts.jsonl: one line a training rollout, graded or not, that leads from a step to its trials.

metrics.jsonl names the group that each step trained; the lines here name the group's trials, whose conversations lie in
RUN_DIR/trials/<trial>. A resumed worker counts groups from 0 again, so a line also says when its worker started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe import json_lines

FILE = "rollouts.jsonl"


class RolloutLog:
    """Written by the rollout worker's process, from all its session threads; None as path writes nothing."""

    def __init__(self, path: Path | None):
        self.path, self.worker, self._lock = path, time.time(), threading.Lock()

    def add(self, group: int, reward: float | None, tool_calls: int, session: Mapping[str, Any]) -> None:
        """`session` says which trial it was and, for a rollout without reward, why (HarborSession.record)."""
        if self.path is None:
            return
        with self._lock:
            json_lines.append(self.path, {"time": time.time(), "worker": self.worker, "group": group, "reward": reward,
                                          "tool_calls": tool_calls, **session})


def read(run: Path) -> list[dict[str, Any]]:
    """The rollouts of a run folder, in the order in which they ended."""
    return [r for r in json_lines.read(run / FILE) if {"time", "worker", "group"} <= r.keys()]


def of_step(rollouts: list[dict[str, Any]], group: int, when: float) -> list[dict[str, Any]]:
    """The rollouts of the group `group` that a step trained at `when`: those of the worker that ran then."""
    found = [r for r in rollouts if r["group"] == group and r["time"] <= when]
    worker = max((r["worker"] for r in found), default=0.0)
    return [r for r in found if r["worker"] == worker]
