"""Where the seconds of a rollout went: sandbox, agent, model, verifier. Read from Harbor's own record of the trial."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

NAMES = ("sandbox", "agent", "model", "verifier")


def of_trial(trial: Path, model_seconds: float) -> dict[str, float]:
    """Seconds by name: `sandbox` is its start and the agent's set-up, `model` the time with a model call under way,
    `agent` the rest of the agent's run (its boot, its tools). {} for a trial that left no record."""
    try:
        record = json.loads((trial / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    agent = _seconds(record.get("agent_execution"))
    model = min(model_seconds, agent)
    found = {"sandbox": _seconds(record.get("environment_setup")) + _seconds(record.get("agent_setup")),
             "agent": agent - model, "model": model, "verifier": _seconds(record.get("verifier"))}
    return {name: round(seconds, 3) for name, seconds in found.items()}


def _seconds(span: Mapping[str, str] | None) -> float:
    if not span or not span.get("started_at") or not span.get("finished_at"):
        return 0.0
    start, end = (datetime.fromisoformat(span[key]) for key in ("started_at", "finished_at"))
    return (end - start).total_seconds()


def means(cells: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds by name over the cells that have phases; `other` is what the cell took beside them."""
    cells = [c for c in cells if c["phases"]]
    if not cells:
        return {}
    found = {name: fmean(c["phases"][name] for c in cells) for name in NAMES}
    found["other"] = max(0.0, fmean(c["seconds"] for c in cells) - sum(found.values()))
    return found
