"""The server under test: any server at POLICY_URL, or the CPU server on a random model of the fixture.

    python -m pytest tests/contract                                            # our CPU server
    POLICY_URL=http://127.0.0.1:8001 python -m pytest tests/contract/test_policy_server.py      # a real vLLM

A vLLM for it is started with `ENGINE=vllm bash serve_policy.sh --mode train` (or eval). Tests of what that server does
not offer by its mode are then skipped with the reason; the CPU server offers everything, so nothing is skipped there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from policy_fixture import make_model
from policy_launch import Server, start_cpu_server


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    given = os.environ.get("POLICY_URL")
    if given:
        url = given.rstrip("/")
        model = os.environ.get("POLICY_MODEL") or requests.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        yield Server(url, model, None)
        return
    folder = make_model(tmp_path_factory.mktemp("served"))
    process, url = start_cpu_server(folder, "--served-model-name", "tiny-policy", "--max-model-len", "2048",
                                    "--dev-mode", "--enable-lora")
    try:
        yield Server(url, "tiny-policy", folder)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == -signal.SIGTERM
        process.stdout.close()


@pytest.fixture
def dev_server(server: Server) -> Server:
    """A server with the pausing and weight routes; it is running again when the test ends."""
    if server.get("/is_paused").status_code != 200:
        assert not server.is_ours
        pytest.skip("the server at POLICY_URL runs without VLLM_SERVER_DEV_MODE=1")
    yield server
    server.post("/resume")
