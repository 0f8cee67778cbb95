"""Rollouts of the trainer's tests, with one task in three slower than the rest: groups finish out of order.

Those whose fate is "hangs" never finish.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from small_engine import SmallSession, SmallSessions  # noqa: E402

SLOW = 1.5  # seconds


class SlowSession(SmallSession):
    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        if self.fate == "hangs":
            time.sleep(3600)
        if self.task % 3 == 0:
            time.sleep(SLOW)
        return super().wait_for_completion(timeout_s)


@dataclass
class SlowSessions(SmallSessions):
    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> SmallSession:
        plain = super().create(task, seed, episode_id)
        return SlowSession(plain.url, plain.task, plain.fate, plain.number)
