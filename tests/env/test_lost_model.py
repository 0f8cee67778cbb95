"""An agent that ran out of time on its task, and one whose model went away: only the first is graded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from openenv.harbor.models import HarborRolloutResult

from recipe.call_times import CallTimes
from recipe.grading import AGENT_TIMEOUT, problem_of
from recipe.seams import observed_rollout

STEP_DONE = {"type": "step_finish", "part": {"reason": "tool-calls"}}
LAST_STEP = {"type": "step_finish", "part": {"reason": "stop"}}
TOOL_RUNS = {"type": "step_start", "part": {}}
NOT_FOUND = {"type": "error", "error": {"name": "APIError", "data": {"message": "Not Found", "statusCode": 404}}}


def rollout(folder: Path, statuses: list[int], event: dict | None, exception: str | None = AGENT_TIMEOUT,
            held: bool = False, engine_lives: bool = True, stops: int = 0) -> HarborRolloutResult:
    """A rollout whose model calls were answered `statuses` (and, with `held`, one more has no answer), whose agent's
    last event is `event`, which the step budget ended `stops` times, and that ended with `exception`."""
    calls = CallTimes()

    async def stock(*, on_session_created, trials_dir):
        on_session_created("key")
        for status in [*statuses, *[0] * held]:
            async def proxy(scope, receive, send, status=status):
                if status:
                    await send({"type": "http.response.start", "status": status})
                else:
                    await asyncio.Event().wait()

            async def sent(message):
                """The agent's side."""

            scope = {"type": "http", "method": "POST", "headers": [(b"x-api-key", b"key")]}
            tasks.append(asyncio.create_task(calls.around(proxy)(scope, None, sent)))
            await asyncio.sleep(0)
        if event:
            file = Path(trials_dir) / "trial/agent/opencode.txt"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(TOOL_RUNS) + "\n" + json.dumps(event) + "\n")
        turn = {"turn": 0, "completion_token_ids": [5], "text": "x"}
        return HarborRolloutResult(trial_name="trial", reward=0.0, ok=exception is None, exception_type=exception,
                                   error="timed out" if exception else None, turns=[turn], budget_stop_count=stops)

    tasks: list[asyncio.Task] = []

    async def run():
        try:
            rollout = observed_rollout(stock, calls, "full", None, lambda: engine_lives)
            return await rollout(trials_dir=str(folder))
        finally:
            for task in tasks:
                task.cancel()

    return asyncio.run(run())


@pytest.mark.parametrize(("what", "why"), [
    (dict(statuses=[200, 502], event=STEP_DONE), "the policy server failed .* answered 502"),
    (dict(statuses=[200, 502], event=STEP_DONE, held=True), "the policy server failed"),
    (dict(statuses=[200, 502, 502, 200], event=LAST_STEP, exception=None, stops=1), "2 failed calls used up the step"),
    (dict(statuses=[200, 404], event=TOOL_RUNS, exception=None), "answered 404"),
    (dict(statuses=[200], event=STEP_DONE, held=True, engine_lives=False), "the policy server went away"),
    (dict(statuses=[200], event=STEP_DONE), "the route to its public port was down"),
    (dict(statuses=[200], event=NOT_FOUND, exception="NonZeroAgentExitCodeError"),
     "NonZeroAgentExitCodeError: the agent ended with APIError 404: Not Found"),
])
def test_a_lost_model_has_no_grade(tmp_path, what, why):
    import re

    assert re.search(why, problem_of(rollout(tmp_path, **what)))


@pytest.mark.parametrize("what", [
    dict(statuses=[200], event=TOOL_RUNS, engine_lives=False),  # a command of the agent that does not end
    dict(statuses=[200], event=STEP_DONE, held=True),  # the engine is at work on the next turn
    dict(statuses=[502, 200], event=TOOL_RUNS),  # the engine came back
    dict(statuses=[200], event=LAST_STEP),
    dict(statuses=[200, 200], event=LAST_STEP, exception=None, stops=1),
    dict(statuses=[200, 400, 200], event=LAST_STEP, exception=None, stops=1),
    dict(statuses=[200, 502, 200], event=LAST_STEP, exception=None),  # a repeated call that went well
    dict(statuses=[200, 400], event=STEP_DONE, exception=None),  # too long a prompt is the agent's own
    dict(statuses=[200], event=None),
    dict(statuses=[200, 200], event=LAST_STEP, exception=None),
])
def test_what_the_agent_did_itself_is_graded(tmp_path, what):
    assert problem_of(rollout(tmp_path, **what)) is None
