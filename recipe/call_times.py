"""When the model calls of each rollout began and ended, and how: noted in front of the capture proxy, sent with the
result.

The trainer compares the times with those of its weight syncs (recipe/sync_log.py). An agent makes its first call
seconds after its rollout was started, so the start says little about the weights that its tokens were sampled from.
All times are Unix seconds of this machine; `our_clock` makes the trainer's of them, which may run on another one. The
last answer's status tells an agent that ran out of time from one whose model went away (recipe/lost_model.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keys in HarborRolloutResult.phase_timings: arrival of the first model call, end of the last one's answer, seconds in
# which at least one was under way, HTTP status of the last answer (0: none yet), calls that have none, and calls that
# failed for no fault of their own.
FIRST_CALL = "first_model_call"
LAST_CALL = "last_model_call"
MODEL_SECONDS = "model_seconds"
LAST_STATUS = "last_model_status"
UNDER_WAY = "model_calls_under_way"
FAILED = "failed_model_calls"
# ... and when the request for the rollout came and its result went, by which clocks of two machines are compared
CAME, WENT = "rollout_came", "rollout_went"
OWN_FAULT = (400, 413, 422)  # the proxy passes these on: a prompt that is too long, for instance


@dataclass
class _Calls:
    first: float | None = None
    last: float | None = None
    under_way: int = 0
    busy: float = 0.0  # seconds, of the times that are over
    since: float = 0.0  # of the time that is not
    status: int = 0
    failed: int = 0


class CallTimes:
    """Times of the calls of all rollouts that run. Used from one event loop."""

    def __init__(self) -> None:
        self._rollouts: dict[str, _Calls] = {}  # session id, which is the agent's API key

    def begin(self, session_id: str) -> None:
        """Calls with the key `session_id` are noted from now on; those with any other key are not."""
        self._rollouts[session_id] = _Calls()

    def end(self, session_id: str) -> dict[str, float]:
        """The six values above, or {} for a rollout that called no model. A call under way lasts until now."""
        calls = self._rollouts.pop(session_id)
        if calls.first is None:
            return {}
        now = time.time()
        return {FIRST_CALL: calls.first, LAST_CALL: now if calls.under_way or calls.last is None else calls.last,
                MODEL_SECONDS: calls.busy + (now - calls.since if calls.under_way else 0.0),
                LAST_STATUS: calls.status, UNDER_WAY: calls.under_way, FAILED: calls.failed}

    def around(self, app: Any) -> Any:
        """`app`, the capture proxy's ASGI app, with its model calls noted."""

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            calls = self._rollouts.get(_key(scope)) if scope["type"] == "http" and scope["method"] == "POST" else None
            if calls is None:
                await app(scope, receive, send)
                return

            async def noting(message: Any) -> None:
                if message["type"] == "http.response.start":
                    calls.status = message["status"]
                    calls.failed += failed(calls.status)
                await send(message)

            calls.first = calls.first or time.time()
            if not calls.under_way:
                calls.since = time.time()
            calls.under_way += 1
            try:
                await app(scope, receive, noting)
            finally:
                calls.under_way -= 1
                calls.last = time.time()
                if not calls.under_way:
                    calls.busy += calls.last - calls.since

        return noted


def our_clock(times: Mapping[str, float], asked: float, received: float) -> tuple[float, float] | None:
    """First and last model call of a result's `times` in the clock of its caller, who asked for the rollout at `asked`
    and had the result at `received`; None for a rollout without a call.

    A request comes after it was sent, and a result before it is received. Where that does not hold the clocks differ,
    by something between two bounds: the first call is then as early and the last as late as they allow, so that a
    rollout is taken for staler than it was, never for fresher.
    """
    if FIRST_CALL not in times:
        return None
    first, last = times[FIRST_CALL], times[LAST_CALL]
    least, most = times[WENT] - received, times[CAME] - asked  # that the other clock can be ahead
    return (first, last) if least <= 0 <= most else (first - most, last - least)


def failed(status: float) -> bool:
    """Whether an answer with this HTTP status says that the engine or the proxy failed."""
    return status >= 400 and status not in OWN_FAULT


def _key(scope: Any) -> str | None:
    from openenv.core.harness.capture.sessions import extract_api_key

    return extract_api_key({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
