"""How the two apps are served: in which order, with how many threads, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from recipe.serving import serve


def app() -> tuple[Starlette, socket.socket]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))]), sock


def url(served: tuple[Starlette, socket.socket]) -> str:
    return f"http://127.0.0.1:{served[1].getsockname()[1]}/"


def run(public, control, **more) -> int:
    return asyncio.run(asyncio.wait_for(serve(public, control, **{"threads": 4, **more}), 60))


async def answers(served) -> bool:
    async with httpx.AsyncClient(timeout=0.5) as client:
        try:
            return (await client.get(url(served))).text == "here"
        except httpx.HTTPError:
            return False


async def until_answers(served) -> None:
    while not await answers(served):
        await asyncio.sleep(0.01)


def test_the_control_plane_follows_when_the_first_work_is_done():
    public, control, seen = app(), app(), []

    async def first() -> None:
        await until_answers(public)
        seen.append(await answers(control))

    async def watch() -> None:
        await until_answers(control)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    assert run(public, control, first=first, watch=watch) == 143 and seen == [False]


@pytest.mark.parametrize("when", ["first", "watch"])
def test_what_the_first_work_or_the_watch_raises_ends_the_servers(when):
    async def fails() -> None:
        raise LookupError("no route")

    with pytest.raises(LookupError, match="no route"):
        run(app(), app(), **{when: fails})


def test_a_signal_during_the_first_work_ends_it():
    async def first() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    assert run(app(), app(), first=first) == 130


def test_as_many_commands_run_at_once_as_there_are_threads_and_none_holds_up_the_end():
    n = (os.cpu_count() or 1) + 10  # Python's own pool has cores + 4
    all_run, never = threading.Barrier(n), threading.Event()

    async def watch() -> None:
        await asyncio.gather(*(asyncio.to_thread(all_run.wait, 60) for _ in range(n)))
        abandoned = asyncio.create_task(asyncio.to_thread(never.wait, 300))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await abandoned

    try:
        assert run(app(), app(), threads=n, watch=watch) == 143
    finally:
        never.set()
