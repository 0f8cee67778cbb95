"""What the HF Sandboxes of a run have cost: RUN_DIR/sandboxes.json, kept by the env server, read by everyone.

    python3 -m recipe.sandbox_costs --run-dir runs/x     # one line, or nothing where no HF Sandbox was started

A sandbox is a Job of its own, billed by the minute from its start to its end. Standard library only.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from recipe.exits import Parser
from recipe.watchdog import write_atomic

FILE = "sandboxes.json"
# Dollars an hour: https://huggingface.co/docs/hub/jobs-pricing
PRICES = {"cpu-basic": 0.01, "cpu-upgrade": 0.03}


class Costs:
    """Counts sandboxes as they end. A server that goes on in the same run folder goes on counting."""

    def __init__(self, run_dir: Path, flavor: str) -> None:
        self.path, self.flavor, self.lock = run_dir / FILE, flavor, threading.Lock()
        self.totals = read(run_dir) or {"flavor": flavor, "started": 0, "failed": 0, "minutes": 0.0, "dollars": 0.0}

    def ended(self, seconds: float, started: bool = True) -> None:
        """One sandbox more, which lived for `seconds`; not `started` when it never became ready."""
        with self.lock:
            self.totals["started" if started else "failed"] += 1
            self.totals["minutes"] += seconds / 60
            # A flavor without a known price is counted at 0 and the line says so.
            self.totals["dollars"] += seconds / 3600 * PRICES.get(self.flavor, 0.0)
            self.totals["flavor"] = self.flavor
            write_atomic(self.path, json.dumps(self.totals))


def read(run_dir: Path) -> dict[str, Any] | None:
    """{flavor, started, failed, minutes, dollars} of a run; None where no HF Sandbox has ended yet."""
    try:
        return json.loads((run_dir / FILE).read_text())
    except FileNotFoundError:
        return None


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
