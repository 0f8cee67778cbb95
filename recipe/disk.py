"""A full disk, told by its errors: libraries hide it behind others of their own."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NEARLY = 1 << 20  # bytes left by a writer that stopped because nothing more fitted


def chain(err: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it was raised from."""
    while err is not None:
        yield err
        err = err.__cause__ or err.__context__


def is_full(err: BaseException, folder: Path | None = None) -> bool:
    """True when `err` comes from a full disk. torch.save names none, so the free space of `folder` counts too."""
    if any(getattr(e, "errno", None) in FULL or "No space left on device" in str(e) for e in chain(err)):
        return True
    return folder is not None and folder.is_dir() and shutil.disk_usage(folder).free < NEARLY


def advice(folder: Path) -> str:
    return f"The disk of {folder} is full ({shutil.disk_usage(folder).free >> 20} MiB free): free some of it first."
