"""A double of the proxy in front of Hugging Face Jobs: a real HTTP forwarder.

    https://<job>--<port>.hf.jobs/<path>   is here   <proxy.url>/<job>--<port>.hf.jobs/<path>

A job's port answers while the job runs and exposes it; one that is not public asks for a token of the Hub. `strip`
names request headers (lower case) that do not arrive on public ports; `lost` makes public ports unreachable in one of
three ways: "page" (200 with an error page), "gone" (404), "reset". Every request is noted in `seen`.
"""

from __future__ import annotations

import http.client
import re
from http.server import BaseHTTPRequestHandler
from typing import Any

from loopback import LoopbackServer

HOP = {"transfer-encoding", "connection", "content-length", "server", "date"}


class JobsProxy(LoopbackServer):
    def __init__(self, hub: Any) -> None:
        self.hub = hub
        self.targets: dict[tuple[str, int], tuple[int, str]] = {}  # (job, port) -> local port, path prefix there
        self.strip: set[str] = set()
        self.stripped = 0
        self.lost = ""
        self.seen: list[tuple[str, int, str, int]] = []  # job, port, "METHOD /path", status
        super().__init__(_handler(self))

    def address(self, job: str, port: int) -> str:
        return f"{self.url}/{job}--{port}.hf.jobs"

    def target(self, job: str, port: int, bearer: str) -> tuple[int, str] | int:
        """Where a request goes, or the status it gets instead."""
        found = self.hub.jobs.get(job)
        expose = (found or {}).get("spec", {}).get("expose", {})
        if not found or found["status"]["stage"] != "RUNNING" or port not in expose.get("ports", []):
            return 404
        if port in expose.get("portsPublic", []):
            if self.lost:
                return 404
        elif bearer not in self.hub.tokens:
            return 401
        return self.targets.get((job, port), 502)


def _handler(proxy: JobsProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # a response ends with its connection: nothing to re-frame

        def _forward(self) -> None:
            match = re.fullmatch(r"/([0-9a-f]+)--(\d+)\.hf\.jobs(/.*)?", self.path)
            if not match:
                return self._answer(404, b"no such host")
            job, port, path = match[1], int(match[2]), match[3] or "/"
            public = port in proxy.hub.jobs.get(job, {}).get("spec", {}).get("expose", {}).get("portsPublic", [])
            target = proxy.target(job, port, self.headers.get("Authorization", "").removeprefix("Bearer "))
            self.rfile_body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if public and proxy.lost == "reset":
                self.close_connection = True
                return self.connection.close()
            if isinstance(target, int):
                status = 200 if public and proxy.lost == "page" else target
                proxy.seen.append((job, port, f"{self.command} {path}", status))
                return self._answer(status, b"<html>This job is not available</html>")
            self._pass_on(job, port, path, target, proxy.strip if public else set())

        def _pass_on(self, job: str, port: int, path: str, target: tuple[int, str], strip: set[str]) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in strip}
            proxy.stripped += len(self.headers) - len(headers)
            headers["Connection"] = "close"
            upstream = http.client.HTTPConnection("127.0.0.1", target[0])
            try:
                upstream.request(self.command, target[1] + path, self.rfile_body or None, headers)
                response = upstream.getresponse()
                proxy.seen.append((job, port, f"{self.command} {path}", response.status))
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                self.end_headers()
                while chunk := response.read1(65536):
                    self.wfile.write(chunk)
                    self.wfile.flush()
            except OSError:
                self.close_connection = True  # either side went away
            finally:
                upstream.close()

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _forward

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler
