"""Keeps trackio's data of the tests out of the home directory: it reads its folder when TRL imports it."""

from __future__ import annotations

import os
import shutil
import tempfile

FOLDER = tempfile.mkdtemp(prefix="trackio-tests-")
os.environ["TRACKIO_DIR"] = FOLDER
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def pytest_unconfigure() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
