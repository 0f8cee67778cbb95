"""What stays on disk of a finished rollout.

Harbor copies all that the agent wrote to RUN_DIR/trials/<trial>/agent. Nearly all of it, over a megabyte a rollout, is
OpenCode's own state: a database with its write-ahead log. Nothing reads it after the rollout: the conversation is in
trajectory.json and opencode.txt beside it, the tokens are in the result.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

AGENT_STATE = Path("agent/opencode")  # Harbor points OpenCode's XDG folders below it
KEPT = ".log"  # OpenCode's own log, a few kilobytes

logger = logging.getLogger(__name__)


def prune(trial: Path) -> int:
    """Removes the agent's state but its logs from the folder of a finished trial; returns the bytes it held.

    Follows no link. A file that cannot be removed is left, with a warning: it must not cost the rollout.
    """
    removed = 0
    if (trial / AGENT_STATE).is_symlink():
        return removed
    try:
        for base, folders, files in os.walk(trial / AGENT_STATE, topdown=False):
            for name in (name for name in files if not name.endswith(KEPT)):
                path = Path(base, name)
                removed += path.lstat().st_size
                path.unlink()
            for path in (Path(base, name) for name in folders):
                if path.is_symlink():
                    path.unlink()
                elif not any(path.iterdir()):
                    path.rmdir()
    except OSError as err:
        logger.warning("the agent's state of trial %s was not removed: %s", trial, err)
    return removed
