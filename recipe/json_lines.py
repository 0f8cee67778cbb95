"""Files of one JSON object a line that grow while they are read, and survive a kill in the middle of a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one line. Callers of several threads take turns."""
    with path.open("a+b") as file:
        if file.tell():  # a line torn by a kill must not swallow this one
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines; torn and foreign ones are left out. Empty when there is no file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
