"""Checks of single settings: each takes a value and returns None, or what is wrong with it and what to do.

Standard library only, as recipe/config.py, which uses them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Check = Callable[[Any], str | None]


def one_of(*allowed: str) -> Check:
    return lambda v: None if v in allowed else f"must be one of {', '.join(allowed)}"


def between(low: float, high: float, why: str = "") -> Check:
    return lambda v: None if low <= v <= high else f"must lie between {low:g} and {high:g}{why and ', ' + why}"


def at_least(low: float) -> Check:
    return lambda v: None if v >= low else f"must be at least {low:g}"


def repo_id(v: str) -> str | None:
    parts = v.split("/")
    ok = v == "" or (len(parts) == 2 and all(parts))
    return None if ok else 'must be "owner/name", for example ADAPTER_REPO=you/LFM2.5-2.6B-opencode-lora-RL'


def http_url(v: str) -> str | None:
    ok = v == "" or re.fullmatch(r"https?://[^/\s]+/?", v)
    return None if ok else "must be http://HOST:PORT, without a path"


def dataset_id(v: str) -> str | None:
    return None if v == "generated" or (v and not repo_id(v)) else (
        'must be "owner/name", for example DATASET=agentica-org/DeepCoder-Preview-Dataset, or generated')


def modules(*known: str) -> Check:
    """Names of linear layers, with or without what they lie in: q_proj, self_attn.q_proj."""
    def check(names: tuple[str, ...]) -> str | None:
        unknown = [name for name in names if name.split(".")[-1] not in known]
        return f"{', '.join(unknown)} is no module of an LFM2 or Qwen3 model: take some of {', '.join(known)}" if (
            unknown) else None
    return check


def is_path(model: str) -> bool:
    """Whether MODEL means a folder wherever it lies, as a Hub id never looks so."""
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def no_model_folder(model: str) -> str | None:
    """What is wrong with a MODEL that is a path; None for a Hub id and for a folder that holds a model."""
    if not is_path(model) or (Path(model) / "config.json").is_file():
        return None
    wrong = "lacks config.json" if Path(model).is_dir() else "does not exist"
    return f"MODEL={model}: this folder {wrong}: name a folder that holds a model, or a Hub id such as owner/name."


def almost(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that `name` is most likely a slip for; None where it is none, or one of another program.

    A known name with a prefix or suffix of words (UV_CACHE_DIR, TRACKIO_SPACE_ID) is another program's own, and of
    short names only those count that differ by underscores, case or a plural (MODE is no slip for MODEL).
    """
    def plain(text: str) -> str:
        return text.upper().replace("_", "").rstrip("S")

    known = list(known)
    if name in known:
        return None
    if same := [k for k in known if plain(k) == plain(name)]:
        return same[0]
    if any(name.endswith(f"_{k}") or name.startswith(f"{k}_") for k in known):
        return None
    return next(iter(difflib.get_close_matches(name, [k for k in known if len(k) > 6], 1, 0.85)), None)
