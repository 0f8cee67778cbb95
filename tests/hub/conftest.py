"""One double of the Hub for the whole session: huggingface_hub reads its endpoint once, when it is imported."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_double import HubDouble, hub_environ

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # its doubles of engine and env server process
assert "huggingface_hub" not in sys.modules, "huggingface_hub was imported before its endpoint was set"
HOME = Path(tempfile.mkdtemp(prefix="hub-tests-"))
HUB = HubDouble()
os.environ.update(hub_environ(HUB, HOME), TRACKIO_DIR=str(HOME / "trackio"), TRL_EXPERIMENTAL_SILENCE="1")
HUB.thread.start()


def pytest_unconfigure() -> None:
    HUB.__exit__()
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    """The double, empty; the client sleeps 0.01 s where it would back off for seconds."""
    from huggingface_hub.utils import _http

    HUB.repos, HUB.lfs_store, HUB.jobs, HUB.requests, HUB.faults = {}, {}, {}, [], []
    HUB.on_job, HUB.on_end, HUB.orgs = [], [], []
    HUB.tokens, HUB.job_rights, HUB.rights = {"hf_write": "write"}, True, None
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setattr(_http.http_backoff, "__kwdefaults__",
                        _http.http_backoff.__kwdefaults__ | {"base_wait_time": 0.01, "max_wait_time": 0.01})
    shutil.rmtree(HOME / "hub", ignore_errors=True)
    yield HUB


@pytest.fixture
def folder() -> Iterator[Path]:
    """A job's folder, not below pytest's tmp_path: under proot the agent runs as nobody and has to be able to enter."""
    made = Path(tempfile.mkdtemp(prefix="recipe-job-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


class SmallDisk:
    """A file system of `size` bytes at `folder`."""

    size = 2 << 20

    def __init__(self, folder: Path):
        self.folder, self.ballast = folder, folder / "ballast"

    @contextlib.contextmanager
    def filled(self, left: int = 96 << 10) -> Iterator[None]:
        """No more than `left` bytes are free."""
        with self.ballast.open("wb") as file:
            file.write(b"x" * (shutil.disk_usage(self.folder).free - left))
        try:
            yield
        finally:
            if not self.keep:
                self.ballast.unlink()

    keep = False

    @contextlib.contextmanager
    def kept_full(self) -> Iterator[None]:
        """What `filled` took inside is given back at the end of this."""
        self.keep = True
        try:
            yield
        finally:
            self.keep = False
            self.ballast.unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A real one of 2 MiB (tmpfs), which only root may mount."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SmallDisk.size}", "tmpfs", str(folder)], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
