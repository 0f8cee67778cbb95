"""Tests of the recipe on real vLLM: `bash run_tests.sh gpu` on any machine with a GPU and vLLM.

Where vLLM and the rest are installed already: `ENVIRONMENTS=present bash run_tests.sh gpu`. Without a GPU or vLLM the
group fails and says so; with one GPU the test of two is skipped. Every test that was skipped is named at the end with
the reason. Tests share a server by its configuration (gpu_server.py); those that the chosen tests need start side by
side, while tests that need none run. Logs are in /tmp/lfm-gpu-tests; the model of 2.6B's shape is that of the
benchmarks and stays in /tmp/lfm-random-2.6b.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "tests" / "trainer"), str(REPO / "tests" / "contract"), str(REPO / "tests" / "e2e")]


def pytest_sessionstart() -> None:
    missing = []
    if not torch.cuda.is_available():
        missing.append("a CUDA GPU (torch sees none)")
    if importlib.util.find_spec("vllm") is None and not shutil.which("vllm"):
        missing.append("vLLM (neither a package of this Python nor the command)")
    if missing:
        pytest.exit(f"tests/gpu needs {' and '.join(missing)}; nothing was tested", returncode=1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "policy(name): the configuration of gpu_server.py that `server` serves")


def configuration(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("policy")
    return mark.args[0] if mark else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without a server come first, and those of two GPUs are skipped where there is one."""
    from gpu_server import CONFIGURATIONS, ONE_GPU

    items.sort(key=lambda item: configuration(item) is not None)
    for item in items:
        name = configuration(item)
        if name and CONFIGURATIONS[name].gpus > torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason=ONE_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.write_line(f"skipped {report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")


@pytest.fixture(scope="session", autouse=True)
def servers(request: pytest.FixtureRequest) -> Iterator:
    """Begins to start all servers that the chosen tests need; ends them."""
    from gpu_server import Servers

    pool = Servers()
    try:
        for item in request.session.items:
            if not item.get_closest_marker("skip") and (name := configuration(item)):
                pool.start(name)
        yield pool
    finally:
        pool.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, servers):
    """The server of the test's `policy` mark, healthy."""
    return servers.get(configuration(request.node))


@pytest.fixture(scope="session")
def large_model() -> Path:
    """LFM2.5-2.6B's shape with random weights."""
    from bench.model import FOLDER, make_model

    return make_model(FOLDER)
