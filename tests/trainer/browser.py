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
        self.profile, self.number, self.requests = profile, 0, []

    def __enter__(self) -> Browser:
        self.process = subprocess.Popen(
            [binary(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             f"--user-data-dir={self.profile}", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        port_file, until = self.profile / "DevToolsActivePort", time.monotonic() + PATIENCE
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self.process.poll() is None and time.monotonic() < until, "Chromium did not start"
            time.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        self.connection = connect(pages[0]["webSocketDebuggerUrl"], max_size=None, proxy=None)
        self.socket = self.connection.__enter__()
        self.call("Page.enable")
        self.call("Network.enable")
        return self

    def __exit__(self, *_: Any) -> None:
        self.connection.__exit__(None, None, None)
        os.killpg(self.process.pid, signal.SIGKILL)  # what was started may be a script around the browser
        self.process.wait(PATIENCE)

    def call(self, method: str, until: str = "", **params: Any) -> dict[str, Any]:
        """The method's result, after the event `until` where one is named."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        result = None
        while result is None or until:
            message = json.loads(self.socket.recv(PATIENCE))
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get("method") == until:
                until = ""
            if message.get("id") == self.number:
                assert "error" not in message, message
                result = message["result"]
        return result

    def open(self, page: Path) -> None:
        self.requests.clear()
        self.call("Page.navigate", until="Page.loadEventFired", url=page.resolve().as_uri())

    def js(self, expression: str) -> Any:
        """The value of an expression; runs beside the page's own policy."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
