"""Processes that carry a mark in their environment, by which a test finds all that it has started."""

from __future__ import annotations

import contextlib
from pathlib import Path

from recipe.sandbox_files import environ_of
from recipe.watchdog import alive


def carrying(mark: str) -> list[int]:
    """Ids of the living processes with `mark` in their environment, also in the middle of an exec."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if alive(int(process.name)) and mark.encode() in environ_of(process):
                found.append(int(process.name))
    return found
