"""The route of remote sandboxes: whose capture proxy answers, and what a lost one does to rollouts."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from recipe import route, watchdog
from recipe.config import Settings
from recipe.gate import Gate
from recipe.route import RouteCheck, RouteLost


class Served:
    """`async with Served(routes) as url`: real HTTP on a loopback port; `strip` takes headers away on the way in."""

    def __init__(self, *routes, strip: tuple[str, ...] = ()) -> None:
        app = Starlette(routes=[*routes])

        async def stripped(scope, receive, send):
            if "headers" in scope:
                scope["headers"] = [(k, v) for k, v in scope["headers"] if k.decode() not in strip]
            await app(scope, receive, send)

        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/capture"
        self.server = uvicorn.Server(uvicorn.Config(stripped, log_level="error"))

    async def __aenter__(self) -> str:
        self.task = asyncio.create_task(self.server.serve(sockets=[self.socket]))
        while not self.server.started:
            await asyncio.sleep(0.01)
        return self.url

    async def __aexit__(self, *_) -> None:
        self.server.should_exit = True
        await self.task


def check(url: str = "", gate: Gate | None = None) -> RouteCheck:
    return RouteCheck(url, gate or Gate(), every=0.01)


@pytest.mark.parametrize(("strip", "says"), [
    ((), "Authorization is forwarded"), (("authorization",), "Authorization is taken away on the way")])
def test_the_own_proxy_is_known_with_and_without_authorization(strip, says):
    async def run() -> str:
        mine = check()
        async with Served(mine.route("/capture"), strip=strip) as mine.url:
            return await mine.ask()

    assert says in asyncio.run(run())


def test_a_way_that_takes_the_session_key_away_is_no_way():
    async def run() -> None:
        mine = check()
        async with Served(mine.route("/capture"), strip=("x-api-key",)) as mine.url:
            await mine.ask()

    with pytest.raises(RouteLost, match="takes the x-api-key header away"):
        asyncio.run(run())


def page(request):
    return HTMLResponse("<h1>Your job is starting</h1>")


def cached(request):
    return JSONResponse({"signed": "0" * 64, "x_api_key": True, "authorization": True})


@pytest.mark.parametrize("routes", [
    [Route("/capture/route-check", page)], [Route("/capture/route-check", cached)], [],
    [check().route("/capture")]], ids=["a page", "an old answer", "nothing", "another job's proxy"])
def test_a_200_of_somebody_else_is_not_believed(routes):
    async def run() -> None:
        async with Served(*routes) as url:
            await check(url).ask()

    with pytest.raises(RouteLost, match="does not lead to this capture proxy: HTTP"):
        asyncio.run(run())


def test_the_start_waits_for_the_route_and_then_gives_up(monkeypatch):
    monkeypatch.setattr(route, "RETRY_S", 0.01)
    monkeypatch.setattr(route, "START_LIMIT_S", 0.05)
    with pytest.raises(RouteLost, match="cannot be reached .Connect"):
        asyncio.run(check("http://127.0.0.1:1").first())


def test_a_lost_route_closes_the_gate_and_its_return_opens_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(route, "RETRY_S", 0.01)
    (tmp_path / watchdog.BLOCKED).write_text("{}")  # of an earlier server
    gate = Gate(tmp_path)
    mine = check("http://127.0.0.1:1", gate)

    async def run() -> None:
        assert not (tmp_path / watchdog.BLOCKED).exists()
        await mine.confirm()
        waiting = asyncio.create_task(gate.passed())
        assert not (await asyncio.wait([waiting], timeout=0.05))[0], "a rollout started although none can work"
        assert watchdog.read(tmp_path / watchdog.BLOCKED)["waiting"] == 1
        gate.close("sandboxes", "they do not start.")
        async with Served(mine.route("/capture")) as mine.url:
            await mine.confirm()
        assert not waiting.done(), "one of two causes is over"
        heartbeat = {"phase": "train", "time": 0.0, "step": 3}
        text = watchdog.stall_message(heartbeat, 900, Settings(), "again", watchdog.read(tmp_path / watchdog.BLOCKED))
        assert "No rollout can be started: they do not start." in text
        gate.open("sandboxes", "they do.")
        await asyncio.wait_for(waiting, 60)

    asyncio.run(run())
    out = capsys.readouterr().out
    assert out.count("BLOCKED: The route of the sandboxes is lost") == 1 and "UNBLOCKED" in out
    assert not (tmp_path / watchdog.BLOCKED).exists()


def test_a_route_that_stays_away_ends_the_server(monkeypatch):
    monkeypatch.setattr(route, "RETRY_S", 0.01)
    with pytest.raises(RouteLost, match="no rollout could be started for 0 s. The route of the sandboxes is lost"):
        asyncio.run(asyncio.wait_for(check("http://127.0.0.1:1").watch(limit=0.1), 60))
