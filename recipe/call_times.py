"""When the model calls of each rollout began and ended: noted in front of the capture proxy, sent with the result.

The trainer compares them with the times of its weight syncs (recipe/sync_log.py). An agent makes its first call
seconds after its rollout was started, so the start says little about the weights that its tokens were sampled from.
All times are Unix seconds of this machine, on which the trainer and the engine run too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

# Keys in HarborRolloutResult.phase_timings: arrival of the first model call, end of the last one's answer.
FIRST_CALL = "first_model_call"
LAST_CALL = "last_model_call"


@dataclass
class _Calls:
    first: float | None = None
    last: float | None = None
    under_way: int = 0


class CallTimes:
    """Times of the calls of all rollouts that run. Used from one event loop."""

    def __init__(self) -> None:
        self._rollouts: dict[str, _Calls] = {}  # session id, which is the agent's API key

    def begin(self, session_id: str) -> None:
        """Calls with the key `session_id` are noted from now on; those with any other key are not."""
        self._rollouts[session_id] = _Calls()

    def end(self, session_id: str) -> dict[str, float]:
        """{FIRST_CALL, LAST_CALL}, or {} for a rollout that called no model. A call under way lasts until now."""
        calls = self._rollouts.pop(session_id)
        if calls.first is None:
            return {}
        last = time.time() if calls.under_way or calls.last is None else calls.last
        return {FIRST_CALL: calls.first, LAST_CALL: last}

    def around(self, app: Any) -> Any:
        """`app`, the capture proxy's ASGI app, with its model calls noted."""

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            calls = self._rollouts.get(_key(scope)) if scope["type"] == "http" and scope["method"] == "POST" else None
            if calls is None:
                await app(scope, receive, send)
                return
            calls.first = calls.first or time.time()
            calls.under_way += 1
            try:
                await app(scope, receive, send)
            finally:
                calls.under_way -= 1
                calls.last = time.time()

        return noted


def _key(scope: Any) -> str | None:
    from openenv.core.harness.capture.sessions import extract_api_key

    return extract_api_key({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
