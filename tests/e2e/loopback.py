"""Loopback ports of the tests, and the life of their HTTP doubles: a server of the standard library."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


def free_ports(number: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, each another one."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [s.getsockname()[1] for s in sockets]


def free_port() -> int:
    return free_ports(1)[0]


def job_ports() -> dict[str, str]:
    """The port settings of a job, with ports that are free."""
    return dict(zip(("PUBLIC_PORT", "POLICY_PORT", "ENV_PORT"), map(str, free_ports(3)), strict=True))


class LoopbackServer:
    """While a `with` lasts: serves `handler` on 127.0.0.1:`port` (0: a free one) between __enter__ and __exit__."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port: int = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
