"""Where the tasks of a run come from, as prepare_tasks.py noted it in RUN_DIR/tasks/<split>.json.

Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path


def of_run(run: Path, split: str) -> str:
    """`owner/name@commit` of a Hub dataset, or how the tasks were generated; empty where it was not noted."""
    try:
        return str(json.loads((run / "tasks" / f"{split}.json").read_text()).get("source", ""))
    except (OSError, ValueError):
        return ""


def dataset(source: str) -> tuple[str, str] | None:
    """(owner/name, commit) of a source on the Hub; None for generated tasks."""
    name, _, revision = source.partition("@")
    return (name, revision) if revision and name.count("/") == 1 else None
