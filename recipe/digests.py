"""Short hashes that name files and settings, so that a result can say what it was made with. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LENGTH = 16  # hexadecimal digits: 64 bits


def of_files(files: Iterable[Path]) -> str:
    """Names the names and contents of `files`, in their order."""
    return of_hashes({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})


def of_tree(folder: Path) -> str:
    """Names all files below `folder` by their paths and contents."""
    return of_hashes({str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
                      for path in sorted(folder.rglob("*")) if path.is_file()})


def of_hashes(hashes: Mapping[str, str]) -> str:
    """The same from file name -> SHA-256 in hexadecimal, as a checkpoint's manifest has it."""
    total = hashlib.sha256()
    for name, digest in hashes.items():
        total.update(name.encode() + b"\0" + bytes.fromhex(digest))
    return total.hexdigest()[:LENGTH]


def of_values(values: Any) -> str:
    """Names anything that is ready for JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:LENGTH]
