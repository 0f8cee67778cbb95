"""Keeps trackio's data of the tests out of the home directory (it reads its folder when TRL imports it), and made-up
examples the same in every run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # its loopback ports
FOLDER = tempfile.mkdtemp(prefix="trackio-tests-")
os.environ["TRACKIO_DIR"] = FOLDER
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
# The same examples in every run, on a machine of any speed.
settings.register_profile("same everywhere", derandomize=True, database=None, deadline=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same everywhere")


def pytest_unconfigure() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.fixture
def trl_globals(monkeypatch) -> list[tuple[object, str]]:
    """(module, name) of the TRL globals that recipe/trl_cpu.py replaces; they are put back after the test."""
    import trl.trainer.utils as trl_utils
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

    names = [(async_rollout_worker, "is_vllm_available"), (async_grpo_trainer, "create_model_from_path"),
             (async_grpo_trainer, "get_peak_flops_per_device"), (trl_utils, "_ChunkedLogProbFunction")]
    for module, name in names:
        monkeypatch.setattr(module, name, getattr(module, name))
    return names
