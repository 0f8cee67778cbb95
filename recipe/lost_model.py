"""Rollouts whose agent lost its model: the engine or the route to the capture proxy went away while it worked.

OpenCode repeats a failing model call until its time is over, so such a rollout ends as an agent timeout, and the
verifier grades the half of the work that was done. It says nothing about the model: it has no grade. Two signs tell:

- the last answer of the capture proxy was a failure of the engine (it passes 400, 413 and 422 on: those are the
  request's own fault, a prompt that is too long for instance)
- the agent ran out of time waiting for a model call that never reached the proxy: its last event is the end of a step,
  after which OpenCode asks the model at once, and no call is under way
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipe.call_times import LAST_STATUS, UNDER_WAY
from recipe.grading import AGENT_TIMEOUT

MODEL_LOST = "ModelLost"  # as `exception_type` of a result
EVENTS = Path("agent/opencode.txt")  # one JSON object a line, as `opencode run --format=json` prints them
OWN_FAULT = (400, 413, 422)


def lost_model(result: Any, calls: dict[str, float], trial: Path) -> str | None:
    """Why the agent of `result` (a HarborRolloutResult) lost its model, or None. `calls` is from CallTimes.end."""
    status = int(calls.get(LAST_STATUS, 0))
    if status >= 400 and status not in OWN_FAULT:
        return f"the policy server failed while the agent worked: its last model call was answered {status}"
    if result.exception_type == AGENT_TIMEOUT and calls and not calls[UNDER_WAY] and waits_for_model(trial):
        return ("the agent ran out of time repeating a model call that did not reach the capture proxy: the route to "
                "its public port was down")
    return None


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
