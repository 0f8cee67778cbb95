"""A serve_env.sh process for the tests, on free ports."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from loopback import free_port

from recipe.config import REPO, Settings

ADMIN_KEY = "admin-key-of-the-tests"
LIMIT_S = 600  # of a start or an end, which take ten seconds where nobody else computes
# Seconds of an agent in tests of its timeout and of a lost model, which it calls again until they are over: the next
# one where a loaded machine did not come to what is tested.
AGENT_LIMITS = (45, 180, 600)


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

    def stop(self, signum: int = signal.SIGTERM, timeout: float = LIMIT_S) -> int:
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
                 variables: dict[str, str] | None = None, **environ: str) -> EnvServer:
    """Starts serve_env.sh on `run_dir`; with `wait`, returns once it is healthy. `environ` are settings, `variables`
    what the server reads beside them."""
    settings = Settings.load(dict(PRESET="local", RUN_DIR=str(run_dir), POLICY_PORT=str(engine_port), MODEL="scripted",
                                  PUBLIC_PORT=environ.pop("PUBLIC_PORT", "") or str(free_port()),
                                  ENV_PORT=str(free_port()), **({"AGENT_TIMEOUT": "900", "MAX_MODEL_CALLS": "4"} |
                                                                environ)))
    full = {**{k: os.environ[k] for k in ("PATH", "HOME", "TMPDIR") if k in os.environ}, **settings.environ(),
            "ENV_PYTHON": needed("ENV_PYTHON"), "OPENCODE_BIN": needed("OPENCODE_BIN"),
            "CAPTURE_ADMIN_KEY": ADMIN_KEY, "PUBLIC_URL": public_url,
            **(variables or {})}
    log = run_dir / f"env-{settings.env_port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(["bash", str(REPO / "serve_env.sh")], env=full, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    server = EnvServer(settings, process, log, public_url or f"http://127.0.0.1:{settings.public_port}")
    if wait:
        _wait_healthy(server)
    return server


def _wait_healthy(server: EnvServer, limit: float = LIMIT_S) -> None:
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
