"""Rollouts whose agent lost its model: the engine or the route to the capture proxy went away while it worked.

OpenCode repeats a failing model call until its time is over, so such a rollout ends as an agent timeout, and the
verifier grades the half of the work that was done. It says nothing about the model: it has no grade. Any of these
tells:

- the last answer of the capture proxy was a failure of the engine
- calls failed and the step budget is used up: the proxy counts the agent's repeated calls too, then ends it politely
- the agent ran out of time waiting for a model call that never reached the proxy: its last event is the end of a step,
  after which OpenCode asks the model at once, and no call is under way
- it ran out of time while a call was under way, and the engine answers no more: the proxy repeats that call itself
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe.call_times import FAILED, LAST_STATUS, UNDER_WAY, failed
from recipe.grading import AGENT_TIMEOUT

MODEL_LOST = "ModelLost"  # as `exception_type` of a result
EVENTS = Path("agent/opencode.txt")  # one JSON object a line, as `opencode run --format=json` prints them


def lost_model(result: Any, calls: dict[str, float], trial: Path, engine_lives: Callable[[], bool]) -> str | None:
    """Why the agent of `result` (a HarborRolloutResult) lost its model, or None. `calls` is from CallTimes.end;
    `engine_lives` is asked, and may take a while, only when the agent ran out of time during a call."""
    if not calls:
        return None
    if failed(calls[LAST_STATUS]):
        return ("the policy server failed while the agent worked: its last model call was answered "
                f"{calls[LAST_STATUS]:.0f}")
    if calls[FAILED] and result.budget_stop_count:
        return (f"the policy server failed while the agent worked: {calls[FAILED]:.0f} failed calls used up the "
                "step budget")
    if result.exception_type != AGENT_TIMEOUT:
        return None
    if calls[UNDER_WAY] and not engine_lives():
        return "the policy server went away while the agent worked: its last model call has no answer"
    if not calls[UNDER_WAY] and waits_for_model(trial):
        return ("the agent ran out of time repeating a model call that did not reach the capture proxy: the route to "
                "its public port was down")
    return None


def answers(url: str) -> bool:
    """Whether the engine at `url` says in one of three looks that it is well."""
    for pause in (1.0, 2.0, 0.0):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=20):
            return True
        time.sleep(pause)
    return False


def waits_for_model(trial: Path) -> bool:
    """Whether the last thing that the agent reported is the end of a step with tool calls."""
    event = last_event(trial)
    return event.get("type") == "step_finish" and event.get("part", {}).get("reason") == "tool-calls"


def agent_error(trial: Path) -> str | None:
    """The error with which the agent ended, in its own words: Harbor reports its whole command line instead."""
    event = last_event(trial)
    if event.get("type") != "error":
        return None
    error = event.get("error", {})
    data = error.get("data", {})
    return f"the agent ended with {error.get('name')} {data.get('statusCode', '')}: {data.get('message', '')}"


def last_event(trial: Path) -> dict[str, Any]:
    """The agent's last event; {} where there is none that can be read."""
    try:
        event = json.loads((trial / EVENTS).read_text(errors="replace").rstrip().rsplit("\n", 1)[-1])
    except (OSError, ValueError):
        return {}
    return event if isinstance(event, dict) else {}
