"""Tests of the recipe on real vLLM: `bash run_tests.sh gpu` on any machine with a GPU and vLLM.

Where vLLM and the rest are installed already: `ENVIRONMENTS=present bash run_tests.sh gpu`. Without a GPU or vLLM the
group fails and says so; with one GPU the tests of two are skipped with the reason. About 6 minutes on an H200, most of
it three starts of vLLM; logs are in /tmp/lfm-gpu-tests.
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


@pytest.fixture(scope="session")
def train_server() -> Iterator:
    """The tiny model as training serves it: pausing, weight routes, our worker extension."""
    from gpu_server import TINY, serve

    with serve(TINY, "train", "tiny-train") as server:
        yield server


@pytest.fixture(scope="session")
def eval_server() -> Iterator:
    """The tiny model as evaluation serves it: adapters at run time."""
    from gpu_server import TINY, serve

    with serve(TINY, "eval", "tiny-eval") as server:
        yield server


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LFM2.5-2.6B's shape with random weights."""
    from bench.model import make_model

    return make_model(tmp_path_factory.mktemp("large") / "model")
