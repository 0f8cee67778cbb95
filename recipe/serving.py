"""How the env server's two apps are served: what the public port shows, and how rollouts and processes end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from recipe.exits import EXIT_UNAVAILABLE

MOUNT = "/capture"
WS_PING_S = 120.0  # a loaded machine answers pings late, and a closed socket loses a rollout that was paid for
SHUTDOWN_S = 10  # for sandboxes to stop before they are swept


def outer_app(capture_app: Any, *routes: Any) -> Any:
    """What the public port serves: `routes` and `capture_app` at /capture, 404 for every other path."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[*routes, Mount(MOUNT, app=capture_app)])


class Threads(ThreadPoolExecutor):
    """The event loop's own pool. A command in a remote sandbox holds a thread for as long as it runs, and the agent's
    runs for minutes, where Python's default has cores + 4 threads. At the end nobody waits for an abandoned one."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


class EndAbandonedRollouts:
    """ASGI middleware: a WebSocket client that leaves ends its rollout, and with it the sandbox.

    OpenEnv's handler reads the socket only between two steps, so a rollout whose caller is gone would keep a
    sandbox, a session and the engine until the agent's timeout.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def answer(message: Any) -> None:
            with contextlib.suppress(OSError):  # nobody is there any more, as the next message will say
                await send(message)

        handler = asyncio.create_task(self.app(scope, messages.get, answer))

        async def listen() -> None:
            while True:
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "websocket.disconnect":
                    await asyncio.wait([handler], timeout=1)  # an idle handler reads it and leaves by itself
                    return

        listener = asyncio.create_task(listen())
        try:  # cancelled once: a second time would end the handler's own cleaning up
            await asyncio.wait([handler, listener], return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.cancel()
            handler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await handler
        if listener.done() and not listener.cancelled():
            listener.result()  # what broke the socket


async def serve(public: tuple[Any, socket.socket], control: tuple[Any, socket.socket], *, threads: int,
                first: Callable[[], Coroutine[Any, Any, None]] | None = None,
                watch: Callable[[], Coroutine[Any, Any, None]] | None = None) -> int:
    """Serves each app on its bound socket until SIGTERM or SIGINT; returns 128 + signal, or 69 if a server ends.

    `threads` is how many commands may run in sandboxes at once. `first` runs between the start of the public app and
    that of the control plane, by which the world knows that all is well; `watch` runs beside both. What either raises
    ends the servers and is raised.
    """
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:
            return contextlib.nullcontext()  # one handler for all servers, below

    # One thread and one loop: the children of sandboxes die with the thread that started them.
    servers = [Server(uvicorn.Config(app, log_level="warning", lifespan="on", ws_ping_interval=WS_PING_S,
                                     ws_ping_timeout=WS_PING_S, timeout_graceful_shutdown=SHUTDOWN_S))
               for app, _ in (public, control)]
    received: list[int] = []
    failed: list[Exception] = []
    ended = asyncio.Event()

    def stop(signum: int = 0) -> None:
        received.append(signum)
        ended.set()
        for server in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    loop.set_default_executor(Threads(threads))
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)

    async def run(server: Any, sock: socket.socket) -> None:
        try:
            await server.serve(sockets=[sock])
        finally:
            stop()

    async def beside(work: Coroutine[Any, Any, None]) -> None:
        """`work`, given up as soon as the servers end."""
        task, end = asyncio.create_task(work), asyncio.create_task(ended.wait())
        await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except Exception as err:  # raised below, when the servers have ended
            failed.append(err)
            stop()

    running = [asyncio.create_task(run(servers[0], public[1]))]
    if first:
        await beside(first())
    if not ended.is_set():
        running.append(asyncio.create_task(run(servers[1], control[1])))
        if watch:
            running.append(asyncio.create_task(beside(watch())))
    await asyncio.gather(*running)
    if failed:
        raise failed[0]
    return 128 + received[0] if received and received[0] else EXIT_UNAVAILABLE
