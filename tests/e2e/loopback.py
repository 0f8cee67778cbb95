"""Loopback ports of the tests, and the life of their HTTP doubles: a server of the standard library."""

from __future__ import annotations

import random
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

LOWEST = 15_000
_taken: list[socket.socket] = []  # a name for each port that was given away


def free_ports(number: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on and nobody gets before the server that they are for: minutes may pass
    until it listens. The kernel gives those above to whoever connects or asks for any port, and a name in its table of
    sockets keeps tests that run beside these from choosing the same, until this process ends."""
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    highest = max(above, LOWEST + 5_000)
    found: list[int] = []
    for port in random.SystemRandom().sample(range(LOWEST, highest), highest - LOWEST):
        if len(found) == number:
            break
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0recipe-tests-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            name.close()
            continue
        _taken.append(name)
        found.append(port)
    assert len(found) == number, f"no {number} free ports in {LOWEST}-{highest}"
    return found


def free_port() -> int:
    return free_ports(1)[0]


def job_ports() -> dict[str, str]:
    """The port settings of a job, with ports that are free."""
    return dict(zip(("PUBLIC_PORT", "POLICY_PORT", "ENV_PORT"), map(str, free_ports(3)), strict=True))


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # with the 5 of the library a burst of clients waits for seconds


class LoopbackServer:
    """While a `with` lasts: serves `handler` on 127.0.0.1:`port` (0: a free one) between __enter__ and __exit__."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        self.server = _Server(("127.0.0.1", port), handler)
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
