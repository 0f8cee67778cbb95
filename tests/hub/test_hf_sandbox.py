"""Rollouts in HF Sandboxes: env server, Harbor's hf-sandbox, the real client and OpenCode, against the doubles."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from env_server_process import ADMIN_KEY, EnvServer, needed, start_server
from hub_double import TOKEN, HubDouble, hub_environ, running
from jobs_proxy import JobsProxy
from loopback import free_port
from sandbox_double import SandboxDouble
from scripted_engine import Reply, ScriptedEngine, bash_then_answer
from world import Registry, public_job, task_files, until

from recipe import hf_sandbox_jobs, hub_tasks, local_tasks, sandbox_costs
from recipe.config import REPO, Settings
from recipe.harbor_sessions import HarborSession, HarborSessionFactory, RolloutFailed, run_eval_rollout

LIMIT_S = 900  # of a rollout that takes ten seconds where nobody else computes
TASKS = sorted(local_tasks.generate("train", 2, seed=0), key=lambda task: task.name)


@dataclass
class World:
    hub: HubDouble
    proxy: JobsProxy
    sandboxes: SandboxDouble
    engine: ScriptedEngine
    registry: Registry
    run_dir: Path
    job: str
    variables: dict[str, str]
    port: int

    def start(self, **settings: str) -> EnvServer:
        return start_server(self.run_dir, self.engine.port, public_url=self.proxy.address(self.job, self.port),
                            variables=self.variables, SANDBOX="hf-sandbox", PUBLIC_PORT=str(self.port),
                            ROUTE_CHECK_EVERY="1", ADAPTER_REPO="me/adapter", AGENT_TIMEOUT=str(LIMIT_S),
                            OPENCODE_INTEGRITY=self.registry.integrity, **settings)

    def session(self, server: EnvServer, task: int = 0) -> HarborSession:
        factory = HarborSessionFactory.from_settings(server.settings, "train")
        return factory.create([{"role": "user", "content": TASKS[task].instruction}])

    def alive(self) -> list[str]:
        return [number for number in running(self.hub) if self.hub.jobs[number]["labels"].get("hf-sandbox") == "1"]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    # Not below pytest's tmp_path: under proot the agent runs as nobody and has to be able to enter.
    folder = Path(tempfile.mkdtemp(prefix="recipe-hf-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def registry(place: Path) -> Iterator[Registry]:
    with Registry(place / "npm", needed("OPENCODE_BIN")) as served:
        yield served


@pytest.fixture
def world(hub: HubDouble, place: Path, registry: Registry) -> Iterator[World]:
    run_dir = Path(tempfile.mkdtemp(dir=place))
    for split in ("train", "test"):
        for task in TASKS:
            for name, text in task_files(task).items():
                path = run_dir / "tasks" / split / task.name / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(hub_tasks.patch_task_toml(text) if name == "task.toml" else text)
    with (JobsProxy(hub) as proxy, SandboxDouble(hub, proxy, run_dir / "machines") as sandboxes,
          ScriptedEngine(lambda request: Reply(text="nothing to do")) as engine):
        port = free_port()
        job = public_job(hub, proxy, port)
        variables = hub_environ(hub, run_dir / "hf") | {"JOB_ID": job, "NPM_CONFIG_REGISTRY": registry.url}
        yield World(hub, proxy, sandboxes, engine, registry, run_dir, job, variables, port)


@pytest.fixture
def server(world: World) -> Iterator[EnvServer]:
    started = world.start()
    yield started
    started.stop(signal.SIGTERM, LIMIT_S)


def right(task: int = 0):
    return bash_then_answer(f"{TASKS[task].pipeline} > /workdir/answer.txt")


def check_a_rollout(world: World, server: EnvServer) -> None:
    """Graded and trainable; nothing secret went into the sandbox; nothing is left; its minutes are counted."""
    world.proxy.strip = {"authorization"}
    world.engine.script = right()
    world.sandboxes.fail_starts = 1  # the second attempt is the one that runs
    session = world.session(server)
    session.wait_for_completion()
    assert session.verify([]).env_reward == 1.0 and len(session.fetch_training_trace().turns) == 2
    session.close()
    assert world.proxy.stripped > 0
    assert {port for job, port, *_ in world.proxy.seen if job == world.job} == {world.port}

    first, second = world.sandboxes.specs
    assert second["flavor"] == "cpu-basic" and second["dockerImage"] == hub_tasks.DOCKER_IMAGE
    assert int(second["environment"]["SBX_IDLE_TIMEOUT"]) > server.settings.agent_timeout
    assert second["labels"]["recipe-owner"] == world.job and second["labels"]["recipe-run"]
    assert second["labels"]["recipe-run"] == first["labels"]["recipe-run"]
    secrets = [TOKEN, ADMIN_KEY]
    assert world.sandboxes.environments and world.sandboxes.written
    for environ in [*world.sandboxes.environments, *(s["environment"] for s in world.sandboxes.specs)]:
        assert "HF_TOKEN" not in environ and not any(s in v for s in secrets for v in environ.values())
    for spec in world.sandboxes.specs:
        assert set(spec["secrets"]) == {"SBX_TOKEN"} and spec["secrets"]["SBX_TOKEN"] not in secrets
    assert not [name for name, content in world.sandboxes.written if any(s.encode() in content for s in secrets)]

    assert world.hub.count("whoami") == 1, "asked once, not before each sandbox"
    assert world.alive() == []
    totals = sandbox_costs.read(world.run_dir)
    assert (totals["started"], totals["failed"]) == (1, 1) and totals["minutes"] > 0
    log = server.log.read_text()
    assert "start 1 of 3 failed" in log and "the image could not be pulled" in log and TOKEN not in log
    assert "route: answered in" in log


def check_a_lost_route(world: World, server: EnvServer) -> None:
    """New rollouts wait, cost nothing meanwhile, and run when the route is back."""
    sandboxes = len(world.sandboxes.specs)
    world.proxy.lost = "page"  # it answers 200, and is not the capture proxy
    blocked = world.run_dir / "blocked.json"
    until(blocked.exists, LIMIT_S)
    assert "does not lead to this capture proxy: HTTP 200" in json.loads(blocked.read_text())["message"]
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(run_eval_rollout(server.settings, "train", 0, "scripted")))
    thread.start()
    until(lambda: json.loads(blocked.read_text())["waiting"] == 1, LIMIT_S)
    assert thread.is_alive() and len(world.sandboxes.specs) == sandboxes
    world.proxy.lost = ""
    thread.join(LIMIT_S)
    assert [(o.status, o.reward) for o in outcomes] == [("graded", 1.0)], outcomes
    assert not blocked.exists() and "UNBLOCKED" in server.log.read_text()


@contextlib.contextmanager
def rollout_in_flight(world: World, server: EnvServer) -> Iterator[threading.Thread]:
    """An agent waits for the model until the end of the block; the rollout must have failed by then."""
    reached, held, errors = threading.Event(), threading.Event(), []

    def script(request):
        reached.set()
        return Reply(text="late", wait=lambda: held.wait(2 * LIMIT_S))

    world.engine.script = script
    session = world.session(server)

    def wait() -> None:
        try:
            session.wait_for_completion()
        except RolloutFailed as err:
            errors.append(err)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert reached.wait(LIMIT_S), server.log.read_text()
        assert len(world.alive()) == 1
        yield thread
        thread.join(LIMIT_S)
        assert errors, "a rollout whose server has gone is not graded"
    finally:
        held.set()
        session.close()


def test_rollouts_the_loss_of_the_route_and_the_end(world: World, server: EnvServer):
    check_a_rollout(world, server)
    check_a_lost_route(world, server)
    with rollout_in_flight(world, server):
        assert server.stop(signal.SIGTERM, LIMIT_S) == 143
        assert world.alive() == []
    assert "sandboxes: 3 ran, 1 did not start" in server.log.read_text()


def test_after_a_kill_the_sweep_ends_what_is_left_but_not_what_others_use(world: World, server: EnvServer):
    with rollout_in_flight(world, server):
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        mine, other = world.alive()[0], public_job(world.hub, world.proxy, 1)
        labels = world.hub.jobs[mine]["labels"]
        for number, owner in (("e1", "f" * 24), ("e2", other)):  # of a job that has ended, and of one that runs
            world.hub.jobs[number] = world.hub.jobs[mine] | {
                "id": number, "labels": labels | {"recipe-owner": owner}, "status": {"stage": "RUNNING"}}
        done = subprocess.run([needed("ENV_PYTHON"), "-m", "recipe.hf_sandbox_jobs", "sweep"], cwd=REPO, text=True,
                              capture_output=True, timeout=LIMIT_S,
                              env={"PATH": os.environ["PATH"], **server.settings.environ(), **world.variables})
        assert done.returncode == 0, done.stderr
        assert mine in done.stdout and "e1" in done.stdout
        assert world.alive() == ["e2"]
        totals = sandbox_costs.read(world.run_dir)
        assert (totals["started"], totals["failed"]) == (1, 0), "the sweep counts what the killed server had"


def test_the_start_sweeps_and_sandboxes_that_do_not_start_are_ungraded(world: World):
    """What a killed job of this adapter left is cancelled; a refusal that lasts closes the gate."""
    labels = hf_sandbox_jobs.labels_of(Settings.load({"ADAPTER_REPO": "me/adapter", "RUN_DIR": "/gone"}),
                                       {"JOB_ID": "d" * 24})
    world.hub.jobs["left"] = world.hub.jobs[world.job] | {
        "id": "left", "labels": labels | {"hf-sandbox": "1"}, "status": {"stage": "RUNNING", "message": None}}
    server = world.start(SANDBOX_STARTS="1")
    try:
        assert world.alive() == [] and "had not ended are cancelled: left" in server.log.read_text()
        world.sandboxes.fail_starts = 1000
        outcome = run_eval_rollout(server.settings, "train", 0, "scripted")
        assert (outcome.status, outcome.reward) == ("ungraded", None)
        world.hub.fail(1000, 402, f"POST /api/jobs/{world.hub.user}$")  # no credit: further attempts change nothing
        assert run_eval_rollout(server.settings, "train", 0, "scripted").status == "ungraded"
        blocked = json.loads((world.run_dir / "blocked.json").read_text())
        assert "sandboxes did not start" in blocked["message"] and "402" in blocked["message"]
    finally:
        server.stop(signal.SIGTERM, LIMIT_S)
    assert sandbox_costs.read(world.run_dir)["failed"] == 2 and world.alive() == []


def test_a_token_that_is_refused_ends_the_start(world: World):
    world.variables["HF_TOKEN"] = "hf_expired"
    server = start_server(world.run_dir, world.engine.port, public_url=world.proxy.address(world.job, world.port),
                          wait=False, variables=world.variables, SANDBOX="hf-sandbox", PUBLIC_PORT=str(world.port))
    assert server.process.wait(LIMIT_S) == 69
    assert "SANDBOX=hf-sandbox cannot be used" in server.log.read_text() and world.engine.requests == []
