"""One env server for the session: the real serve_env.sh, OpenEnv, Harbor, sandbox and OpenCode on a scripted engine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from header_proxy import HeaderProxy
from scripted_engine import Reply, ScriptedEngine

from recipe import local_tasks
from recipe.config import REPO, Settings

ADMIN_KEY = "admin-key-of-the-tests"
N_TASKS = 4


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def needed(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        pytest.fail(f"{name} is not set: run these tests through `bash run_tests.sh e2e`, which makes what they need")
    return value


@dataclass
class EnvServer:
    """A serve_env.sh process and how to reach it. `log` has all it printed."""

    settings: Settings
    process: subprocess.Popen[bytes]
    log: Path
    public_url: str

    @property
    def capture_url(self) -> str:
        return self.public_url + "/capture"

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 40) -> int:
        """Sends `signum` and waits; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def start_server(run_dir: Path, engine_port: int, *, public_url: str = "", wait: bool = True,
                 **environ: str) -> EnvServer:
    """Starts serve_env.sh on `run_dir`; with `wait`, returns once it is healthy."""
    settings = Settings.load(dict(PRESET="local", RUN_DIR=str(run_dir), POLICY_PORT=str(engine_port), MODEL="scripted",
                                  PUBLIC_PORT=environ.pop("PUBLIC_PORT", "") or str(free_port()),
                                  ENV_PORT=str(free_port()), AGENT_TIMEOUT="240", MAX_MODEL_CALLS="4", **environ))
    full = {**{k: os.environ[k] for k in ("PATH", "HOME", "TMPDIR") if k in os.environ}, **settings.environ(),
            "ENV_PYTHON": needed("ENV_PYTHON"), "OPENCODE_BIN": needed("OPENCODE_BIN"),
            "CAPTURE_ADMIN_KEY": ADMIN_KEY, "PUBLIC_URL": public_url}
    log = run_dir / f"env-{settings.env_port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(["bash", str(REPO / "serve_env.sh")], env=full, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    server = EnvServer(settings, process, log, public_url or f"http://127.0.0.1:{settings.public_port}")
    if wait:
        _wait_healthy(server)
    return server


def _wait_healthy(server: EnvServer, limit: float = 180) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            pytest.fail(f"serve_env.sh ended with {server.process.returncode}:\n{server.log.read_text()}")
        try:
            with urllib.request.urlopen(server.settings.env_url + "/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    server.stop(signal.SIGKILL)
    pytest.fail(f"serve_env.sh was not healthy within {limit} s:\n{server.log.read_text()}")


@pytest.fixture(scope="session")
def run_dir() -> Iterator[Path]:
    """A run folder with a few tasks in both splits."""
    # Not below pytest's tmp_path: under proot the agent runs as nobody and has to be able to enter.
    folder = Path(tempfile.mkdtemp(prefix="recipe-e2e-"))
    folder.chmod(0o755)
    for split in ("train", "test"):
        for task in local_tasks.generate(split, N_TASKS, seed=0):
            for name, content in local_tasks.files(task).items():
                path = folder / "tasks" / split / task.name / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def engine() -> Iterator[ScriptedEngine]:
    """Tests set `engine.script` to what the model of their rollout says."""
    with ScriptedEngine(lambda request: Reply(text="nothing to do")) as running:
        yield running


@pytest.fixture(scope="session")
def proxy() -> Iterator[HeaderProxy]:
    """What stands between sandbox and public port; strips nothing unless a test says so."""
    with HeaderProxy(free_port()) as running:
        yield running


@pytest.fixture(scope="session")
def server(run_dir: Path, engine: ScriptedEngine, proxy: HeaderProxy) -> Iterator[EnvServer]:
    running = start_server(run_dir, engine.port, public_url=proxy.url, PUBLIC_PORT=str(proxy.target))
    yield running
    code = running.stop()
    assert code == 143, running.log.read_text()


@pytest.fixture(autouse=True)
def _fresh(engine: ScriptedEngine, proxy: HeaderProxy) -> None:
    engine.requests.clear()
    proxy.strip = set()


@pytest.fixture
def tasks() -> list[local_tasks.LocalTask]:
    """The training tasks in the server's order."""
    return sorted(local_tasks.generate("train", N_TASKS, seed=0), key=lambda task: task.name)
