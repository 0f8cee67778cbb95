"""Parts of the env server that need no engine and no agent."""

from __future__ import annotations

import asyncio

import pytest
from openenv.core.harness.capture import CaptureServer
from starlette.testclient import TestClient

from recipe import env_server, serving
from recipe.config import Settings, SettingsError


def settings(**environ: str) -> Settings:
    return Settings.load(environ)


def test_public_url_of_each_sandbox():
    local = settings(SANDBOX="local", PUBLIC_PORT="8123")
    remote = settings(SANDBOX="hf-sandbox")
    assert env_server.public_url(local, {}) == "http://127.0.0.1:8123/capture"
    assert env_server.public_url(remote, {"JOB_ID": "6712ab"}) == "https://6712ab--8000.hf.jobs/capture"
    assert env_server.public_url(remote, {"JOB_ID": "x", "PUBLIC_URL": "https://me.example/"}) == (
        "https://me.example/capture")
    with pytest.raises(SettingsError, match="JOB_ID is not set.*set PUBLIC_URL.*port 8000"):
        env_server.public_url(remote, {})


def test_missing_tasks_are_named(tmp_path):
    made = settings(RUN_DIR=str(tmp_path))
    (tmp_path / "tasks/train/a").mkdir(parents=True)
    (tmp_path / "tasks/train/a/task.toml").touch()
    with pytest.raises(SettingsError, match="tasks/test: run prepare_tasks.py"):
        env_server.check_tasks(made)


def test_public_app_mounts_the_capture_app_and_nothing_else():
    capture = CaptureServer(llm_url="http://127.0.0.1:1", model="m", admin_key="secret")
    client = TestClient(serving.outer_app(capture.app))
    assert client.get("/capture/health").status_code == 200
    assert client.get("/capture/sessions").status_code == 401
    assert client.get("/capture/sessions", headers={"x-api-key": "secret"}).status_code == 200
    for path in ("/", "/health", "/sessions", "/docs", "/openapi.json", "/captured", "/harbor_env/splits"):
        assert client.get(path).status_code == 404
        assert client.post(path).status_code == 404


def websocket(app):
    """Runs the middleware on `app` with a client that connects and leaves; what the app saw is `app`'s business."""
    messages = [{"type": "websocket.connect"}, {"type": "websocket.disconnect"}]

    async def receive():
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()

    async def send(message): ...

    async def run():
        await asyncio.wait_for(serving.EndAbandonedRollouts(app)({"type": "websocket"}, receive, send), 10)

    asyncio.run(run())


def test_a_busy_handler_ends_when_its_client_leaves():
    ended = []

    async def app(scope, receive, send):
        assert (await receive())["type"] == "websocket.connect"
        try:
            await asyncio.sleep(3600)  # a rollout: reads nothing from its socket
        finally:
            ended.append("sandbox stopped")

    websocket(app)
    assert ended == ["sandbox stopped"]


def test_an_idle_handler_reads_the_disconnect_itself():
    seen = []

    async def app(scope, receive, send):
        seen.extend([(await receive())["type"], (await receive())["type"]])

    websocket(app)
    assert seen == ["websocket.connect", "websocket.disconnect"]


def test_an_error_of_the_handler_is_not_swallowed():
    async def app(scope, receive, send):
        raise RuntimeError("broken handler")

    with pytest.raises(RuntimeError, match="broken handler"):
        websocket(app)
