"""Starts the policy server on vLLM, as serve_policy.sh does it."""

from __future__ import annotations

from pathlib import Path

from loopback import free_port

from bench.common import Server
from recipe.config import REPO

LOGS = Path("/tmp/lfm-gpu-tests")
TINY = REPO / "tiny" / "model"


def serve(model: Path, mode: str, name: str, **settings: str) -> Server:
    few = {"MAX_MODEL_LEN": "4096", "MAX_OUTPUT_TOKENS": "256", "GPU_MEMORY_UTILIZATION": "0.15", "GPUS": "1"}
    return Server(model, free_port(), LOGS / f"{name}.log", mode, **(few | settings))
