"""The pinned binary: fetched once, whole or not at all, and every failure says what to do."""

from __future__ import annotations

import base64
import errno
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from recipe import opencode_binary
from recipe.config import REPO, Settings
from recipe.opencode_binary import BinaryError, ensure_binary

CONTENT = b"#!/bin/sh\necho 9.9.9\n"


def tarball(member: str = opencode_binary.MEMBER) -> bytes:
    """The same bytes at any time: a gzip file has in it when it was made, in seconds."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(member)
        info.size, info.mode = len(CONTENT), 0o755
        archive.addfile(info, io.BytesIO(CONTENT))
    return gzip.compress(buffer.getvalue(), mtime=0)


def integrity(data: bytes) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()


class Registry:
    """Serves `data` with `status` for every path; remembers the paths. `cut` bytes are missing at the end."""

    def __init__(self) -> None:
        self.data, self.status, self.cut, self.paths = tarball(), 200, 0, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(outer.data)))
                self.end_headers()
                self.wfile.write(outer.data[: len(outer.data) - outer.cut])

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def registry(monkeypatch):
    made = Registry()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", made.url + "/")
    monkeypatch.delenv("npm_config_registry", raising=False)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings.load({"CACHE_DIR": str(tmp_path), "OPENCODE_VERSION": "9.9.9",
                          "OPENCODE_INTEGRITY": integrity(tarball())})


def left(tmp_path) -> list[str]:
    return [p.name for p in tmp_path.rglob("*") if p.is_file() or p.name.startswith(".")]


def test_is_fetched_once_and_runs(registry, settings, tmp_path):
    path = ensure_binary(settings)
    assert subprocess.check_output([path], text=True) == "9.9.9\n"
    assert ensure_binary(settings) == path
    assert registry.paths == ["/opencode-linux-x64/-/opencode-linux-x64-9.9.9.tgz"], "one request, the second is cached"
    assert left(tmp_path) == ["opencode"]


def test_another_hash_keeps_nothing(registry, settings, tmp_path):
    registry.data = tarball() + b"\0"
    with pytest.raises(BinaryError, match="does not have the pinned hash.*Nothing was kept"):
        ensure_binary(settings)
    assert left(tmp_path) == []
    registry.data = tarball()
    assert ensure_binary(settings).is_file(), "the next attempt starts afresh"


def test_truncated_download_is_tried_again_and_named(registry, settings, tmp_path):
    registry.cut = 40
    with pytest.raises(BinaryError, match="cannot fetch .*IncompleteRead"):
        ensure_binary(settings)
    assert len(registry.paths) == opencode_binary.ATTEMPTS
    assert left(tmp_path) == []


def test_unknown_version_is_asked_for_once(registry, settings):
    registry.status = 404
    with pytest.raises(BinaryError, match="404"):
        ensure_binary(settings)
    assert len(registry.paths) == 1


def test_no_network(settings, monkeypatch):
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:1")
    with pytest.raises(BinaryError, match="cannot fetch http://127.0.0.1:1/.*NPM_CONFIG_REGISTRY.*OPENCODE_BIN"):
        ensure_binary(settings)


def test_full_disk(registry, settings, tmp_path, monkeypatch):
    def full(source, target, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(opencode_binary.shutil, "copyfileobj", full)
    with pytest.raises(BinaryError, match="no space left under .*CACHE_DIR"):
        ensure_binary(settings)
    assert left(tmp_path) == []


def test_package_without_the_binary(registry, tmp_path):
    registry.data = tarball("package/readme")
    settings = Settings.load({"CACHE_DIR": str(tmp_path), "OPENCODE_INTEGRITY": integrity(registry.data)})
    with pytest.raises(BinaryError, match="holds no package/bin/opencode"):
        ensure_binary(settings)


@pytest.mark.parametrize("value", ["sha1-YWJj", "sha512-not base64", "sha512-YWJj", "none"])
def test_malformed_integrity(tmp_path, value):
    with pytest.raises(BinaryError, match="not of the form sha512-"):
        ensure_binary(Settings.load({"CACHE_DIR": str(tmp_path), "OPENCODE_INTEGRITY": value}))


def test_command_line_prints_the_path_or_the_reason(registry, settings, tmp_path):
    environ = {**settings.environ(), "NPM_CONFIG_REGISTRY": registry.url, "PATH": ""}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "recipe.opencode_binary"], cwd=REPO, env=environ,
                              capture_output=True, text=True)

    assert run().stdout.strip() == str(opencode_binary.binary_path(settings))
    environ["OPENCODE_INTEGRITY"] = integrity(b"another")
    failed = run()
    assert failed.returncode == 69 and "pinned hash" in failed.stderr
