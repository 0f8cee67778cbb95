"""When a rollout's model calls were: noted in front of the proxy, for its own key only, and sent with its result."""

from __future__ import annotations

import asyncio
import time

import pytest
from openenv.harbor.models import HarborRolloutResult

from recipe.call_times import (
    CAME,
    FIRST_CALL,
    LAST_CALL,
    LAST_STATUS,
    MODEL_SECONDS,
    UNDER_WAY,
    WENT,
    CallTimes,
    our_clock,
)
from recipe.seams import observed_rollout


def request(calls: CallTimes, key: str, app, method: str = "POST", header: bytes = b"x-api-key"):
    scope = {"type": "http", "method": method, "headers": [(header, key.encode())]}
    return calls.around(app)(scope, None, dropped)


async def answer(scope, receive, send, status: int = 200):
    await asyncio.sleep(0.02)
    await send({"type": "http.response.start", "status": status})


async def dropped(message):
    """Where answers go."""


def test_first_arrival_and_last_end():
    async def run():
        calls = CallTimes()
        calls.begin("mine")
        start = time.time()
        await request(calls, "mine", answer)
        between = time.time()
        await request(calls, "Bearer mine", answer, header=b"authorization")
        await request(calls, "other", answer)
        await request(calls, "mine", answer, method="GET")
        return start, between, calls.end("mine"), time.time()

    start, between, times, end = asyncio.run(run())
    assert start <= times[FIRST_CALL] <= between - 0.02
    assert between + 0.02 <= times[LAST_CALL] <= end - 0.04, "another rollout's call or a GET counted"
    assert times[UNDER_WAY] == 0 and 0.04 <= times[MODEL_SECONDS] <= times[LAST_CALL] - times[FIRST_CALL]


def test_a_call_under_way_lasts_until_the_end_of_the_rollout():
    async def run():
        calls, held = CallTimes(), asyncio.Event()
        calls.begin("mine")
        await request(calls, "mine", answer)

        async def hold(scope, receive, send):
            await held.wait()

        call = asyncio.create_task(request(calls, "mine", hold))
        await asyncio.sleep(0.05)
        before = time.time()
        times = calls.end("mine")
        held.set()
        await call
        return before, times

    before, times = asyncio.run(run())
    assert times[LAST_CALL] >= before
    assert times[UNDER_WAY] == 1 and times[LAST_STATUS] == 200 and times[MODEL_SECONDS] >= 0.07


def test_errors_of_the_proxy_pass_and_end_the_call():
    async def run():
        calls = CallTimes()
        calls.begin("mine")

        async def broken(scope, receive, send):
            raise RuntimeError("broken proxy")

        with pytest.raises(RuntimeError, match="broken proxy"):
            await request(calls, "mine", broken)
        ended = time.time()
        await asyncio.sleep(0.02)
        return ended, calls.end("mine")

    ended, times = asyncio.run(run())
    assert times[FIRST_CALL] <= times[LAST_CALL] <= ended


def test_result_carries_the_times_and_the_caller_keeps_its_callback():
    async def run():
        calls, told = CallTimes(), []

        async def stock(*, on_session_created, task_dir):
            on_session_created("s1")
            await request(calls, "s1", answer)
            return HarborRolloutResult(task_id=task_dir)

        rollout = observed_rollout(stock, calls, "full")
        asked = time.time()
        return asked, await rollout(task_dir="t", on_session_created=told.append), told, time.time()

    asked, result, told, received = asyncio.run(run())
    times = result.phase_timings
    assert asked <= times[CAME] < times[FIRST_CALL] < times[LAST_CALL] <= times[WENT] <= received
    assert told == ["s1"] and result.task_id == "t"
    assert 0.02 <= result.phase_timings[LAST_CALL] - result.phase_timings[FIRST_CALL] < 60


@pytest.mark.parametrize("ahead", [-300.0, -3.0, 0.0, 3.0, 300.0])
def test_times_of_a_machine_whose_clock_differs(ahead):
    """Asked at 100, on the way until 100.5; calls from 110 to 120; done at 125 and received at 125.2."""
    there = {CAME: 100.5, FIRST_CALL: 110.0, LAST_CALL: 120.0, WENT: 125.0}
    first, last = our_clock({name: value + ahead for name, value in there.items()}, 100.0, 125.2)
    assert 109.5 - 1e-6 <= first <= 110 + 1e-6 and 120 - 1e-6 <= last <= 120.2 + 1e-6, "never taken for fresher"
    assert (first, last) == (110.0, 120.0) or ahead
    assert our_clock({}, 100.0, 125.2) is None


@pytest.mark.parametrize("sessions", [["s1"], []])
def test_rollouts_without_a_model_call_have_no_times(sessions):
    async def stock(*, on_session_created):
        for session in sessions:
            on_session_created(session)
        return HarborRolloutResult()

    assert asyncio.run(observed_rollout(stock, CallTimes(), "full")()).phase_timings == {}


def test_a_rollout_that_is_cancelled_leaves_nothing():
    calls = CallTimes()

    async def run():
        async def stock(*, on_session_created):
            on_session_created("s1")
            await asyncio.sleep(3600)

        task = asyncio.create_task(observed_rollout(stock, calls, "full")())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    with pytest.raises(KeyError):
        calls.end("s1")
