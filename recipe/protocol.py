"""What a cell was made with beside its task and adapter: model, template, sampling, limits, engine, code.

A cell is reused only under the protocol that it was made under; `differences` says what has changed since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from recipe import digests
from recipe.config import REPO, Settings
from recipe.policy_client import PolicyClient
from recipe.watchdog import write_atomic

SETTINGS = ("dtype", "thinking", "temperature", "top_p", "top_k", "max_output_tokens", "max_model_calls",
            "agent_timeout", "max_model_len", "tool_call_parser", "opencode_version", "opencode_integrity",
            "opencode_lean", "sandbox")
# The files that decide what a rollout does and how it is graded, and the versions of OpenEnv and Harbor.
CODE = ("requirements/env-server.txt", "serve_policy.sh", "recipe/call_times.py", "recipe/chat_template.py",
        "recipe/env_server.py", "recipe/grading.py", "recipe/harbor_sessions.py", "recipe/lost_model.py",
        "recipe/opencode_*.py", "recipe/opencode_models.json", "recipe/*sandbox*.py", "recipe/seams.py")


def describe(settings: Settings, client: PolicyClient) -> dict[str, Any]:
    """Every part of the protocol by name, ready for JSON. Asks the policy server for its version."""
    template, weights = _model(settings.model, settings.hub_revision.get("revision"))
    return {"model": Path(settings.model).name if Path(settings.model).is_dir() else settings.model,
            "model_revision": weights, "chat_template": template, "engine": client.version(), "code": code_version(),
            **{name: getattr(settings, name) for name in SETTINGS}}


@cache
def _model(model: str, revision: str | None) -> tuple[str, str]:
    """Digest of the model's chat template; the commit of a Hub model, or a digest of a folder's files."""
    from transformers import AutoTokenizer

    more = {} if revision is None else {"revision": revision}
    template = digests.of_values(AutoTokenizer.from_pretrained(model, **more).chat_template)
    if Path(model).is_dir():
        return template, digests.of_files(sorted(p for p in Path(model).iterdir() if p.is_file()))
    from huggingface_hub import hf_hub_download

    return template, Path(hf_hub_download(model, "config.json", **more)).parent.name  # …/snapshots/<commit>/config.json


@cache
def code_version() -> str:
    """Digest of CODE."""
    return digests.of_files(sorted(file for pattern in CODE for file in REPO.glob(pattern)))


class Protocols:
    """eval/protocols.json: every protocol that a cell of the folder was made under, by its digest."""

    def __init__(self, file: Path):
        self.file = file
        self.known: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def add(self, protocol: Mapping[str, Any]) -> str:
        """Keeps `protocol`; its digest."""
        values = json.loads(json.dumps(protocol))
        digest = digests.of_values(values)
        if digest not in self.known:
            self.known[digest] = values
            write_atomic(self.file, json.dumps(self.known, indent=1, sort_keys=True) + "\n")
        return digest

    def differences(self, then: str, now: str) -> list[str]:
        """What differs, for example "max_output_tokens was 256, is 4096"."""
        old, new = self.known.get(then), self.known[now]
        if old is None:
            return [f"protocol {then} is not in {self.file.name}"]
        return [f"{name} was {old.get(name)}, is {new.get(name)}" for name in sorted(old.keys() | new.keys())
                if old.get(name) != new.get(name)]
