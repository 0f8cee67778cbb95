"""Starts that must be refused with a sentence, and ends that must leave nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
from env_server_process import LIMIT_S, EnvServer, start_server
from scripted_engine import Reply, ScriptedEngine
from test_rollout import assert_nothing_left, session_for

from recipe import sandbox_files
from recipe.harbor_sessions import HarborSessionFactory, RolloutFailed


def test_busy_port_is_named_at_once(run_dir, engine: ScriptedEngine):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = start_server(run_dir, engine.port, wait=False, PUBLIC_PORT=str(port))
        assert server.process.wait(LIMIT_S) == 69
    log = server.log.read_text()
    assert f"port {port} (PUBLIC_PORT) is in use by process {os.getpid()}" in log
    assert engine.requests == [] and "local sandbox" not in log, "the port is looked at before what takes seconds"


class TokenlessEngine(ScriptedEngine):
    """An engine that answers but returns no token ids: good for chat, useless for training."""

    def answer(self, request):
        request.pop("return_token_ids", None)
        return super().answer(request)


class RawLogprobsEngine(ScriptedEngine):
    """An engine whose log-probabilities are those before the temperature."""

    def answer(self, request):
        return super().answer({**request, "temperature": 1.0})


@pytest.mark.parametrize("kind", [TokenlessEngine, RawLogprobsEngine])
def test_engine_that_cannot_be_trained_on_is_refused(run_dir, kind):
    with kind(lambda request: Reply(text="ok")) as engine:
        server = start_server(run_dir, engine.port, wait=False)
        assert server.process.wait(LIMIT_S) == 69
    assert 'is not graded "train"' in server.log.read_text()


def test_dead_engine_is_refused(run_dir):
    server = start_server(run_dir, 1, wait=False)
    assert server.process.wait(LIMIT_S) == 69
    assert "it cannot be used at all" in server.log.read_text()


@pytest.fixture
def rollout_in_flight(run_dir, engine: ScriptedEngine, tasks):
    """(server, thread, errors): a server of its own with one agent that waits for the model."""
    server = start_server(run_dir, engine.port)
    reached, held = threading.Event(), threading.Event()

    def script(request):
        reached.set()
        return Reply(text="late", wait=lambda: held.wait(600))

    engine.script = script
    session = session_for(HarborSessionFactory.from_settings(server.settings, "train"), tasks[0])
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            session.wait_for_completion()
        except BaseException as err:  # noqa: BLE001 - looked at by the test
            errors.append(err)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        assert reached.wait(600), server.log.read_text()
        assert sandbox_files.marked_processes(run_id=str(server.settings.run_path))
        yield server, thread, errors
    finally:
        held.set()
        session.close()
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def test_kill_9_leaves_no_process(rollout_in_flight):
    server, thread, errors = rollout_in_flight
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    deadline = time.monotonic() + 300
    while processes := sandbox_files.marked_processes(run_id=str(server.settings.run_path)):
        assert time.monotonic() < deadline, f"still alive: {processes}"
        time.sleep(0.2)
    thread.join(600)
    assert isinstance(errors[0], RolloutFailed)
    # Its folders stay: nobody was there to remove them. The sweep does.
    sandbox_files.sweep(server.settings.run_path / "sandboxes", str(server.settings.run_path))
    assert_nothing_left(server, 0)


def test_sigterm_ends_rollouts_and_leaves_nothing(rollout_in_flight):
    server: EnvServer
    server, thread, errors = rollout_in_flight
    assert server.stop(signal.SIGTERM) == 143
    assert_nothing_left(server, 0)
    thread.join(600)
    assert isinstance(errors[0], RolloutFailed)
