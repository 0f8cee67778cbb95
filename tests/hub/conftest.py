"""One double of the Hub for the whole session: huggingface_hub reads its endpoint once, when it is imported."""

from __future__ import annotations

import os
import shutil
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
    HUB.on_job, HUB.on_end = [], []
    HUB.tokens, HUB.job_rights, HUB.rights = {"hf_write": "write"}, True, None
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setattr(_http.http_backoff, "__kwdefaults__",
                        _http.http_backoff.__kwdefaults__ | {"base_wait_time": 0.01, "max_wait_time": 0.01})
    shutil.rmtree(HOME / "hub", ignore_errors=True)
    yield HUB
