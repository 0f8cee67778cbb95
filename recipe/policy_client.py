"""The few calls that evaluation makes to a policy server (vLLM or the CPU one): models, adapters, log-probs, health."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import requests

LIKELIEST = 20  # vLLM's own limit


class PolicyError(RuntimeError):
    """The policy server refused or did not answer; the message holds its own words."""


class PolicyClient:
    """`url` is the server's root, for example http://127.0.0.1:8001. Every method raises PolicyError on failure."""

    def __init__(self, url: str, timeout: float = 120.0):
        self.url, self.timeout = url.rstrip("/"), timeout

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        try:
            response = requests.request(method, self.url + path, json=body, timeout=self.timeout)
        except requests.RequestException as err:
            raise PolicyError(f"the policy server at {self.url} does not answer {path}: {err}; see logs/policy*.log "
                              "of the run folder") from err
        if not response.ok:
            raise PolicyError(f"the policy server answered {response.status_code} to {method} {path}: "
                              f"{response.text[:500]}")
        return response

    def version(self) -> str:
        """The engine's version, in its own words."""
        return str(self._request("GET", "/version").json()["version"])

    def models(self) -> dict[str, dict[str, Any]]:
        """Served models by name; an adapter's `parent` is the base's name, the base's is None."""
        return {m["id"]: m for m in self._request("GET", "/v1/models").json()["data"]}

    def load_adapter(self, name: str, path: Path) -> None:
        """Hot-loads the adapter folder `path` as model `name`; an adapter already served under it is replaced."""
        if name in self.models():
            self.unload_adapter(name)
        self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path.resolve())})
        if name not in self.models():
            raise PolicyError(f"the policy server accepted adapter {name} but does not list it in /v1/models")

    def unload_adapter(self, name: str) -> None:
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def next_token(self, model: str, token_ids: list[int], anew: bool = False) -> tuple[dict[str, float], int | None]:
        """({token: log-prob} of the LIKELIEST next tokens at T=1, tokens of the prompt taken from the server's
        cache: None where it does not tell). `anew` takes none: where log-probs are asked for, all is computed."""
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "logprobs": LIKELIEST}
        answer = self._request("POST", "/v1/completions", body | ({"prompt_logprobs": 0} if anew else {})).json()
        told = answer["usage"].get("prompt_tokens_details")
        listed = answer["choices"][0]["logprobs"]["top_logprobs"][0]  # and the sampled token
        return dict(sorted(listed.items(), key=lambda entry: -entry[1])[:LIKELIEST]), told and told.get("cached_tokens")

    def prompt_logprobs(self, model: str, token_ids: list[int]) -> list[float]:
        """Log-probabilities (nats, T=1) of token_ids[1:], each given those before it."""
        body = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        entries = self._request("POST", "/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], entries[1:], strict=True)]
