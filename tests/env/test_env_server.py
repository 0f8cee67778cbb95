"""Parts of the env server that need no engine and no agent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from openenv.core.harness.capture import CaptureServer
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketState
from uvicorn.protocols.utils import ClientDisconnected

from recipe import sandbox_setup, serving
from recipe.config import REPO, Settings, SettingsError


def settings(**environ: str) -> Settings:
    return Settings.load(environ)


def test_public_url_of_each_sandbox():
    local = settings(SANDBOX="local", PUBLIC_PORT="8123")
    remote = settings(SANDBOX="hf-sandbox")
    assert sandbox_setup.public_url(local, {}) == "http://127.0.0.1:8123/capture"
    assert sandbox_setup.public_url(remote, {"JOB_ID": "6712ab"}) == "https://6712ab--8000.hf.jobs/capture"
    assert sandbox_setup.public_url(remote, {"JOB_ID": "x", "PUBLIC_URL": "https://me.example/"}) == (
        "https://me.example/capture")
    with pytest.raises(SettingsError, match="JOB_ID is not set.*set PUBLIC_URL.*port 8000"):
        sandbox_setup.public_url(remote, {})
    for sandbox in ("daytona", "e2b"):  # OpenEnv's forwarder says it; the Job's proxy is not used
        assert sandbox_setup.public_url(settings(SANDBOX=sandbox), {"JOB_ID": "6712ab"}) == ""


@pytest.mark.parametrize(("sandbox", "name"), [("daytona", "DAYTONA_API_KEY"), ("e2b", "E2B_API_KEY"),
                                               ("hf-sandbox", "HF_TOKEN")])
def test_a_missing_key_is_named_before_anything_starts(tmp_path, sandbox, name):
    environ = {"PATH": os.environ["PATH"], "SANDBOX": sandbox, "HF_HOME": str(tmp_path), "PYTHONPATH": str(REPO)}

    def check(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "recipe.sandbox_keys"], env=environ | more, capture_output=True,
                              text=True)

    refused = check()
    assert refused.returncode == 64 and f"SANDBOX={sandbox} needs {name}: set it" in refused.stderr
    good = check(**{name: "the-secret"})
    assert good.returncode == 0 and "the-secret" not in good.stdout + good.stderr
    if sandbox == "hf-sandbox":
        (tmp_path / "token").write_text("from hf auth login")
        assert check().returncode == 0


def test_a_forwarder_that_cannot_run_is_one_sentence():
    with pytest.raises(sandbox_setup.StartError, match="FORWARDER=cloudflare cannot publish.*cloudflared.*PUBLIC_URL"):
        sandbox_setup.open_forwarder(settings(SANDBOX="e2b", FORWARDER="cloudflare"))


def test_an_hf_sandbox_needs_an_image_in_every_task(tmp_path):
    made = settings(SANDBOX="hf-sandbox", RUN_DIR=str(tmp_path))
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / "tasks" / split / name).mkdir(parents=True)
            (tmp_path / "tasks" / split / name / "task.toml").write_text('[environment]\ndocker_image = "image"\n')
    sandbox_setup.check_tasks(made)
    (tmp_path / "tasks/test/b/task.toml").write_text("[environment]\ncpus = 1\n")
    with pytest.raises(SettingsError, match="test/b/task.toml has no .environment. docker_image"):
        sandbox_setup.check_tasks(made)


def test_missing_tasks_are_named(tmp_path):
    made = settings(RUN_DIR=str(tmp_path), SANDBOX="local")
    (tmp_path / "tasks/train/a").mkdir(parents=True)
    (tmp_path / "tasks/train/a/task.toml").touch()
    with pytest.raises(SettingsError, match="tasks/test: run prepare_tasks.py"):
        sandbox_setup.check_tasks(made)


def test_public_app_mounts_the_capture_app_and_nothing_else():
    capture = CaptureServer(llm_url="http://127.0.0.1:1", model="m", admin_key="secret")
    client = TestClient(serving.outer_app(capture.app))
    assert client.get("/capture/health").status_code == 200
    assert client.get("/capture/sessions").status_code == 401
    assert client.get("/capture/sessions", headers={"x-api-key": "secret"}).status_code == 200
    for path in ("/", "/health", "/sessions", "/docs", "/openapi.json", "/captured", "/harbor_env/splits"):
        assert client.get(path).status_code == 404
        assert client.post(path).status_code == 404


def websocket(app, gone=False):
    """Runs the middleware on `app` with a client that connects and leaves; what the app saw is `app`'s business.

    `gone`: it left before anything could be sent to it, as uvicorn says.
    """
    messages = [{"type": "websocket.connect"}, {"type": "websocket.disconnect"}]

    async def receive():
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()

    async def send(message):
        if gone:
            raise ClientDisconnected

    async def run():
        await asyncio.wait_for(serving.EndAbandonedRollouts(app)({"type": "websocket"}, receive, send), 60)

    asyncio.run(run())


def test_a_busy_handler_ends_when_its_client_leaves():
    ended = []

    async def app(scope, receive, send):
        assert (await receive())["type"] == "websocket.connect"
        try:
            await asyncio.sleep(3600)  # a rollout: reads nothing from its socket
        finally:
            await asyncio.sleep(0.05)
            ended.append("sandbox stopped")

    websocket(app)
    assert ended == ["sandbox stopped"]


def test_a_socket_that_fails_ends_its_handler():
    ended = []

    async def app(scope, receive, send):
        try:
            await receive()
        finally:
            ended.append("sandbox stopped")

    async def receive():
        raise RuntimeError("the socket is broken")

    async def run():
        with pytest.raises(RuntimeError, match="broken"):
            await asyncio.wait_for(serving.EndAbandonedRollouts(app)({"type": "websocket"}, receive, None), 60)

    asyncio.run(run())
    assert ended == ["sandbox stopped"]


def test_an_idle_handler_reads_the_disconnect_itself():
    seen = []

    async def app(scope, receive, send):
        seen.extend([(await receive())["type"], (await receive())["type"]])

    websocket(app)
    assert seen == ["websocket.connect", "websocket.disconnect"]


def test_an_answer_that_comes_too_late_is_no_error():
    seen = []

    async def app(scope, receive, send):
        assert (await receive())["type"] == "websocket.connect"
        socket = WebSocket(scope, receive, send)
        socket.client_state = socket.application_state = WebSocketState.CONNECTED
        await socket.send_text("the rollout's result")
        seen.append((await receive())["type"])

    websocket(app, gone=True)
    assert seen == ["websocket.disconnect"]


def test_an_error_of_the_handler_is_not_swallowed():
    async def app(scope, receive, send):
        raise RuntimeError("broken handler")

    with pytest.raises(RuntimeError, match="broken handler"):
        websocket(app)
