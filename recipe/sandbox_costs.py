"""What the HF Sandboxes of a run have cost: RUN_DIR/sandboxes.json, kept by the env server, read by everyone.

    python3 -m recipe.sandbox_costs --run-dir runs/x     # one line, or nothing where no HF Sandbox was started

A sandbox is a Job of its own, billed by the minute from its start to its end. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipe.exits import Parser
from recipe.watchdog import write_atomic

FILE = "sandboxes.json"
LIVING = "living"  # in it, sandboxes that have not ended: id -> when its start began, and whether it became ready
# Dollars an hour: https://huggingface.co/docs/hub/jobs-pricing
PRICES = {"cpu-basic": 0.01, "cpu-upgrade": 0.03}


class Costs:
    """Counts each sandbox once: when it ends, or for all that live when their server ends. Those that live are in the
    file too, so that whoever comes after a server that was killed can count them. What one call changes is in the file
    before another call begins: threads of rollouts call this, at the end of a server beside its main thread."""

    def __init__(self, run_dir: Path, flavor: str) -> None:
        self.path, self.flavor, self.lock = run_dir / FILE, flavor, threading.Lock()
        none = {"started": 0, "failed": 0, "minutes": 0.0, "dollars": 0.0, LIVING: {}}
        self.totals = none | (_load(run_dir) or {}) | {"flavor": flavor}

    def begins(self, attempt: str) -> None:
        """A sandbox is asked for; `attempt` stands for it until it has an id."""
        with self._changed() as living:
            living[attempt] = {"began": time.time(), "ready": False}

    def ready(self, attempt: str, sandbox: str) -> None:
        with self._changed() as living:
            if attempt in living:  # else the server ended meanwhile, and counted it
                living[sandbox] = living.pop(attempt) | {"ready": True}

    def ended(self, *names: str, longest: float = math.inf) -> None:
        """Ids of sandboxes, and attempts, that have ended; without names all that live. None lived for more than
        `longest` seconds."""
        with self._changed() as living:
            for one in filter(None, [living.pop(name, None) for name in names or [*living]]):
                seconds = min(max(time.time() - one["began"], 0.0), longest)
                self.totals["started" if one["ready"] else "failed"] += 1
                self.totals["minutes"] += seconds / 60
                # A flavor without a known price is counted at 0 and the line says so.
                self.totals["dollars"] += seconds / 3600 * PRICES.get(self.flavor, 0.0)

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        with self.lock:
            before = json.dumps(self.totals)
            yield self.totals[LIVING]
            if (after := json.dumps(self.totals)) != before:
                write_atomic(self.path, after)


def _load(run_dir: Path) -> dict[str, Any] | None:
    try:
        return json.loads((run_dir / FILE).read_text())
    except FileNotFoundError:
        return None


def read(run_dir: Path) -> dict[str, Any] | None:
    """{flavor, started, failed, minutes, dollars} of the sandboxes of a run that have ended; None where none has."""
    totals = _load(run_dir) or {}
    totals.pop(LIVING, None)
    return totals if totals.get("started") or totals.get("failed") else None


def line(totals: dict[str, Any]) -> str:
    price = f"about ${totals['dollars']:.2f}" if totals["flavor"] in PRICES else "price of this flavor not known"
    return (f"sandboxes: {totals['started']} ran, {totals['failed']} did not start, {totals['minutes']:.1f} minutes on "
            f"{totals['flavor']}, {price}")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    if totals := read(parser.parse_args(argv).run_dir):
        print(line(totals))
    return 0


if __name__ == "__main__":
    sys.exit(main())
