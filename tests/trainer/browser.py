"""A page as a browser shows it: headless Chromium, driven over its DevTools protocol.

    with Browser(folder) as browser:
        browser.open(page)
        browser.js("document.title")
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 120  # seconds, on a machine that is busy


def binary() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "no Chromium: run the tests with run_tests.sh, which installs it, or name a binary in CHROMIUM"
    return found


class Browser:
    """`requests` has the URL of everything that the open page asked for."""

    def __init__(self, profile: Path):
        self.profile, self.number, self.requests, self.loaded = profile, 0, [], set()

    def __enter__(self) -> Browser:
        self.process = subprocess.Popen(
            [binary(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             "--disable-dev-shm-usage",  # containers have little of it, and a page that lacks it dies
             f"--user-data-dir={self.profile}", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        port_file, until = self.profile / "DevToolsActivePort", time.monotonic() + PATIENCE
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self.process.poll() is None and time.monotonic() < until, "Chromium did not start"
            time.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        while not (pages := self.pages(port)):  # the port is there before the first page
            assert time.monotonic() < until, "Chromium shows no page"
            time.sleep(0.05)
        self.connection = connect(pages[0]["webSocketDebuggerUrl"], max_size=None, proxy=None, open_timeout=PATIENCE,
                                  ping_interval=None)
        self.socket = self.connection.__enter__()
        for method in ("Page.enable", "Network.enable"):
            self.call(method)
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        return self

    @staticmethod
    def pages(port: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
            return [target for target in json.load(answer) if target["type"] == "page"]

    def __exit__(self, *_: Any) -> None:
        self.connection.__exit__(None, None, None)
        os.killpg(self.process.pid, signal.SIGKILL)  # what was started may be a script around the browser
        self.process.wait(PATIENCE)

    def receive(self) -> dict[str, Any]:
        message = json.loads(self.socket.recv(PATIENCE))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Page.lifecycleEvent" and message["params"]["name"] == "load":
            self.loaded.add(message["params"]["loaderId"])
        return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while (message := self.receive()).get("id") != self.number:
            pass
        assert "error" not in message, message
        return message["result"]

    def open(self, page: Path) -> None:
        """Returns when this page is loaded; the load of the one before it may still be reported."""
        self.requests.clear()
        loader = self.call("Page.navigate", url=page.resolve().as_uri())["loaderId"]
        while loader not in self.loaded:
            self.receive()

    def js(self, expression: str) -> Any:
        """The value of an expression; runs beside the page's own policy."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
