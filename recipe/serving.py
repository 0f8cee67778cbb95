"""How the env server's two apps are served: what the public port shows, and how rollouts and processes end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import Any

from recipe.exits import EXIT_UNAVAILABLE

MOUNT = "/capture"
WS_PING_S = 120.0  # a loaded machine answers pings late, and a closed socket loses a rollout that was paid for
SHUTDOWN_S = 10  # for sandboxes to stop before they are swept


def outer_app(capture_app: Any) -> Any:
    """What the public port serves: `capture_app` at /capture, 404 for every other path."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[Mount(MOUNT, app=capture_app)])


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
        handler = asyncio.create_task(self.app(scope, messages.get, send))

        async def listen() -> None:
            while True:
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "websocket.disconnect":
                    await asyncio.wait([handler], timeout=1)  # an idle handler reads it and leaves by itself
                    handler.cancel()
                    return

        listener = asyncio.create_task(listen())
        try:
            await asyncio.wait([handler])
        finally:
            listener.cancel()
            handler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await handler


async def serve(apps: list[tuple[Any, socket.socket]]) -> int:
    """Serves each app on its bound socket until SIGTERM or SIGINT; returns 128 + signal, or 69 if a server ends."""
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:
            return contextlib.nullcontext()  # one handler for all servers, below

    # One thread and one loop: the children of sandboxes die with the thread that started them.
    servers = [Server(uvicorn.Config(app, log_level="warning", lifespan="on", ws_ping_interval=WS_PING_S,
                                     ws_ping_timeout=WS_PING_S, timeout_graceful_shutdown=SHUTDOWN_S))
               for app, _ in apps]
    received: list[int] = []

    def stop(signum: int = 0) -> None:
        received.append(signum)
        for server in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)

    async def run(server: Any, sock: socket.socket) -> None:
        try:
            await server.serve(sockets=[sock])
        finally:
            stop()

    await asyncio.gather(*(run(server, sock) for server, (_, sock) in zip(servers, apps, strict=True)))
    return 128 + received[0] if received and received[0] else EXIT_UNAVAILABLE
