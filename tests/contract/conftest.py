"""The server under test: any server at POLICY_URL, or the CPU server on a random model of the fixture.

    python -m pytest tests/contract                                            # our CPU server
    POLICY_URL=http://127.0.0.1:8001 python -m pytest tests/contract/test_policy_server.py      # a real vLLM

A vLLM for it is started with `ENGINE=vllm bash serve_policy.sh --mode train` (or eval). Tests of what that server does
not offer by its mode are then skipped with the reason; the CPU server offers everything, so nothing is skipped there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from policy_fixture import make_model

REPO = Path(__file__).resolve().parents[2]


@dataclass
class Server:
    """url: root of the server. folder: the model's folder where it is ours, else None."""

    url: str
    model: str
    folder: Path | None

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def post(self, path: str, body: dict[str, Any] | None = None, **kwargs: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120, **kwargs)

    def chat(self, content: str = "Reply with the single word: ok", **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"model": self.model, "prompt": prompt, "max_tokens": 8, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def prompt_logprobs(self, ids: list[int], model: str | None = None) -> list[float]:
        """Log-probs of ids[1:] at temperature 1."""
        answer = self.complete(ids, model=model or self.model, max_tokens=1, prompt_logprobs=0)
        entries = answer["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)]

    @property
    def is_ours(self) -> bool:
        return self.folder is not None

    @property
    def tolerance(self) -> float:
        """Nats between two ways to compute a log-prob: float32 on our side, bf16 kernels on a GPU."""
        return 1e-4 if self.is_ours else 0.25


def start_cpu_server(model: Path, *arguments: str) -> tuple[subprocess.Popen, str]:
    """Starts the CPU server on a free port; returns the process and the url that it prints once it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "recipe.policy_cpu", "--model", str(model), "--port", "0", *arguments],
        cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("Serving "), f"the server ended with {process.wait(30)} instead of serving: {line!r}"
    return process, line.split(" on ")[1].strip()


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
        assert process.wait(30) == -signal.SIGTERM
        process.stdout.close()


@pytest.fixture
def dev_server(server: Server) -> Server:
    """A server with the pausing and weight routes; it is running again when the test ends."""
    if server.get("/is_paused").status_code != 200:
        assert not server.is_ours
        pytest.skip("the server at POLICY_URL runs without VLLM_SERVER_DEV_MODE=1")
    yield server
    server.post("/resume")
