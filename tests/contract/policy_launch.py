"""Starts the CPU policy server, and the few calls that its tests make."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

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
    assert line.startswith("Serving "), f"the server ended with {process.wait(300)} instead of serving: {line!r}"
    return process, line.split(" on ")[1].strip()
