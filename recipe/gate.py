"""The gate that every rollout passes: closed while a rollout started now could only fail.

Two causes close it: no sandbox can reach the capture proxy (recipe/route.py), or sandboxes do not start
(recipe/hf_sandbox.py). New rollouts wait, and have no reward should they wait too long. What is wrong, and how many
wait, stands in RUN_DIR/blocked.json meanwhile, which the watchdog quotes should the run stall.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from recipe.watchdog import BLOCKED, write_atomic


class Gate:
    """Used from one event loop, that of the env server."""

    def __init__(self, run_dir: Path | None = None) -> None:
        self._file = run_dir / BLOCKED if run_dir else None
        self._causes: dict[str, str] = {}  # cause -> message
        self._since = 0.0  # when the gate closed, monotonic
        self._waiting = 0  # rollouts
        self._open = asyncio.Event()
        self._open.set()
        if self._file:
            self._file.unlink(missing_ok=True)  # an earlier server's

    def close(self, cause: str, message: str) -> None:
        """`cause` holds the gate closed. `message`: what is wrong, and what happens next."""
        if not self._causes:
            self._since = time.monotonic()
        if cause not in self._causes:
            print(f"[env] BLOCKED: {message} New rollouts wait until then.", flush=True)
        self._causes[cause] = message
        self._changed()

    def open(self, cause: str, message: str) -> None:
        """`cause` is over."""
        if self._causes.pop(cause, None) is not None:
            print(f"[env] UNBLOCKED: {message}", flush=True)
            self._changed()

    def reason(self, cause: str | None = None) -> str | None:
        """Why the gate is closed (by `cause`); None while it is open."""
        return self._causes.get(cause) if cause else " ".join(self._causes.values()) or None

    def closed_for(self) -> float:
        """Seconds that the gate has been closed without a break; 0 while it is open."""
        return time.monotonic() - self._since if self._causes else 0.0

    async def passed(self) -> None:
        """Returns once the gate is open."""
        if self._open.is_set():
            return
        self._waiting += 1
        self._changed()
        try:
            await self._open.wait()
        finally:
            self._waiting -= 1
            self._changed()

    def _changed(self) -> None:
        if self._causes:
            self._open.clear()
        else:
            self._open.set()
        if self._file and self._causes:
            write_atomic(self._file, json.dumps({"time": time.time(), "message": self.reason(),
                                                 "waiting": self._waiting}))
        elif self._file:
            self._file.unlink(missing_ok=True)
