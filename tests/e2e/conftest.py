"""One env server for the session: the real serve_env.sh, OpenEnv, Harbor, sandbox and OpenCode on a scripted engine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from env_server_process import EnvServer, start_server
from header_proxy import HeaderProxy
from loopback import free_port
from scripted_engine import Reply, ScriptedEngine

from recipe import local_tasks

N_TASKS = 4


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
