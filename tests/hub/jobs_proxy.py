"""A double of the proxy in front of Hugging Face Jobs: a real HTTP forwarder.

    https://<job>--<port>.hf.jobs/<path>   is here   <proxy.url>/<job>--<port>.hf.jobs/<path>

A job's port answers while the job runs and exposes it; one that is not public asks for a token of the Hub. `strip`
names request headers (lower case) that do not arrive on public ports; `lost` makes public ports unreachable in one of
three ways: "page" (200 with an error page), "gone" (404), "reset". Every request is noted in `seen`.
"""

from __future__ import annotations

import re
from typing import Any

from forwarder import Forwarder
from loopback import LoopbackServer


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


def _handler(proxy: JobsProxy) -> type[Forwarder]:
    class Handler(Forwarder):
        def do_GET(self) -> None:
            match = re.fullmatch(r"/([0-9a-f]+)--(\d+)\.hf\.jobs(/.*)?", self.path)
            if not match:
                return self._answer(404, b"no such host")
            self.job, self.exposed, self.rest = match[1], int(match[2]), match[3] or "/"
            expose = proxy.hub.jobs.get(self.job, {}).get("spec", {}).get("expose", {})
            public = self.exposed in expose.get("portsPublic", [])
            bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
            target = proxy.target(self.job, self.exposed, bearer)
            body = self.read_body()
            if public and proxy.lost == "reset":
                self.close_connection = True
                return self.connection.close()
            if isinstance(target, int):
                status = 200 if public and proxy.lost == "page" else target
                self.answered(status)
                return self._answer(status, b"<html>This job is not available</html>")
            self.pass_on(target[0], target[1] + self.rest, body, proxy.strip if public else set())

        do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

        def left_out(self, headers: int) -> None:
            proxy.stripped += headers

        def answered(self, status: int) -> None:
            proxy.seen.append((self.job, self.exposed, f"{self.command} {self.rest}", status))

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
