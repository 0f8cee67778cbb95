"""Takes secrets out of what a rollout wrote, before it goes into a page that somebody shares.

A model that works in a shell may print its environment or its configuration. What is removed: the values of this
process's own secrets, the session keys that the trials' own files name, and whatever has the shape of a credential.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ADMIN_KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIAL", re.I)
SHORTEST = 8  # characters; shorter values (a port, "true") are no secrets and would take words out of the text
SHAPES = [(name, re.compile(pattern)) for name, pattern in (
    ("Hugging Face token", r"(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    ("session key", r"s[0-9a-f]{24}(?![0-9a-f])"),  # OpenEnv's capture sessions
    ("API key", r"\b(?:sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16})"),
    ("web token", r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"),
    ("private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
)]
BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")
# name = value, "name": "value", NAME: value; what is removed is the value
ASSIGNED = re.compile(r"""(?ix) (\b[\w.-]*(?:token|secret|password|passwd|api[_-]?key|admin[_-]?key|access[_-]?key)
                          \\?["']? \s*[:=]\s* \\?["']?) ([^\s"'\\,;&]{8,})""")
NO_SECRET = re.compile(r"\[.* removed|\d[\d.]*$|\$|\{env:|<")  # a count of tokens, a reference to a variable


class Redactor:
    """`text` and `deep` return their argument without secrets; `known` are secrets beside the environment's."""

    def __init__(self, known: Iterable[str] = (), environ: Mapping[str, str] = os.environ):
        values = {value for name, value in environ.items() if SECRET_NAME.search(name)} | set(known)
        # Longest first: a secret that begins with another one goes as a whole.
        exact = sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)
        self.exact = re.compile("|".join(map(re.escape, exact))) if exact else None

    def text(self, text: str) -> str:
        if self.exact:
            text = self.exact.sub("[secret removed]", text)
        for name, shape in SHAPES:
            text = shape.sub(f"[{name} removed]", text)
        text = BEARER.sub(r"\1[token removed]", text)
        return ASSIGNED.sub(_assigned, text)

    def deep(self, value: Any, after: Callable[[str], str] = str) -> Any:
        """A JSON-ready value with all its strings clean, each then passed through `after`."""
        if isinstance(value, str):
            return after(self.text(value))
        if isinstance(value, dict):
            return {key: self.deep(item, after) for key, item in value.items()}
        return [self.deep(item, after) for item in value] if isinstance(value, list) else value


def _assigned(match: re.Match[str]) -> str:
    name, value = match.groups()
    # "token = tokenizer.decode(ids)" is code; a token or key without a digit is hardly ever one.
    code = not re.search(r"passw|secret", name, re.I) and not re.search(r"\d", value)
    return match[0] if code or NO_SECRET.match(value) else f"{name}[secret removed]"


def stored_token() -> list[str]:
    """The token that huggingface_hub would use, from its environment or login."""
    from huggingface_hub import get_token

    return [token] if (token := get_token()) else []
