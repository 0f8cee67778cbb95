"""The Hugging Face job as a whole: launch.py starts it, it runs from its uploaded copy, and reaches its evaluation.

Real: the launcher, the upload, run_job.sh and all that it starts, Harbor's hf-sandbox, OpenCode. Doubles: Hub, Jobs,
Jobs proxy, the machine of each sandbox, npm's registry, and the CPU engine with the tiny model in vLLM's place.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from env_server_process import needed
from hub_double import TOKEN, HubDouble, hub_environ, running
from job_runner import JobRunner
from jobs_proxy import JobsProxy
from loopback import job_ports
from sandbox_double import SandboxDouble
from test_launch import ADAPTER, KEPT, launcher  # noqa: F401 (a fixture)
from world import Registry, bundle, task_files, until

from recipe import hub_tasks, local_tasks
from recipe.checkpoints import MANIFEST
from recipe.config import REPO

TINY = "me/tiny"
STEPS, GROUP, HELD_OUT = 2, 2, 1
LIMIT_S = 1800  # of a job that takes a minute and a half where nobody else computes


def publish(hub: HubDouble, data: Path) -> None:
    """The base model, and datasets of the recipe's shape with their pinned lists in `data`."""
    hub.repo(TINY).add("model", {path.name: path.read_bytes() for path in (REPO / "tiny/model").iterdir()})
    for split, count in (("train", 4), ("test", HELD_OUT)):
        tasks, files = [], {}
        for task in local_tasks.generate(split, count, seed=0):
            made = {name: text.encode() for name, text in task_files(task).items()}
            tasks.append({"name": task.name, "difficulty": task.kind.difficulty,
                          "sha256": hashlib.sha256(made["instruction.md"]).hexdigest()})
            files |= {f"tasks/{task.name}/{name}": content for name, content in made.items()}
        commit = hub.repo(f"me/{split}-tasks", "dataset").add("tasks", files)
        (data / f"{split}.json").write_text(json.dumps({
            "dataset": f"me/{split}-tasks", "revision": commit.sha, "tasks": tasks,
            "grader_sha256": hashlib.sha256(made["tests/grader.py"]).hexdigest()}))


def image(folder: Path) -> Path:
    """What the job's image has on PATH beside the system's: pip and python3; `hf` is what pip installs."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "pip").write_text('#!/bin/sh\n[ "$*" = "-q install huggingface_hub" ] || exit 9\n')
    (tools / "pip").chmod(0o755)
    (tools / "hf").symlink_to(Path(needed("TRAINER_PYTHON")).parent / "hf")
    (tools / "python3").symlink_to(Path(sys.executable).resolve())
    return tools


@pytest.mark.slow
def test_a_submitted_job_trains_and_evaluates(hub: HubDouble, launcher: str, folder: Path):  # noqa: F811
    checkout = bundle(folder)
    publish(hub, checkout / "data")
    ports = job_ports()
    with (Registry(folder / "npm", needed("OPENCODE_BIN")) as registry, JobsProxy(hub) as proxy,
          SandboxDouble(hub, proxy, folder / "machines") as sandboxes):
        proxy.strip = {"authorization"}
        world = hub_environ(hub, folder / "hf", token=None) | {
            "NPM_CONFIG_REGISTRY": registry.url, "CACHE_DIR": str(folder / "cache"),
            **{name: needed(name) for name in ("TRAINER_PYTHON", "ENV_PYTHON", "OPENCODE_BIN")}}
        settings = ports | {
            "MAX_STEPS": STEPS, "N_TRAIN_TASKS": 4, "N_TASKS": HELD_OUT, "MODEL": TINY, "ENGINE": "cpu",
            "DTYPE": "float32", "NUM_GENERATIONS": GROUP, "MAX_INFLIGHT": GROUP, "MAX_MODEL_CALLS": 2,
            "MAX_OUTPUT_TOKENS": 128, "MAX_MODEL_LEN": 16384, "LEARNING_RATE": 1e-3, "EVAL_CONCURRENCY": 2,
            "OPENCODE_INTEGRITY": registry.integrity}
        with JobRunner(hub, proxy, folder / "jobs", image(folder), world) as jobs:
            environ = {name: os.environ[name] for name in KEPT if name in os.environ} | hub_environ(hub, folder / "me")
            started = subprocess.run(
                [launcher, "launch.py", "train", "--adapter-repo", ADAPTER, "--submit",
                 *(word for name, value in settings.items() for word in ("--env", f"{name}={value}"))],
                cwd=checkout, env=environ, capture_output=True, text=True, timeout=900)
            assert started.returncode == 0, started.stdout + started.stderr
            (number,) = jobs.processes
            public = int(ports["PUBLIC_PORT"])

            def trains() -> bool:
                assert jobs.processes[number].poll() is None, jobs.log(number)
                return "[train]" in jobs.log(number)

            until(trains, LIMIT_S)
            # What the world sees of the job while it runs.
            assert requests.get(proxy.address(number, public) + "/capture/health", timeout=300).status_code == 200
            assert requests.get(proxy.address(number, public) + "/harbor_env/splits", timeout=300).status_code == 404
            assert requests.get(proxy.address(number, int(ports["ENV_PORT"])), timeout=300).status_code == 404

            code = jobs.wait(number, LIMIT_S)
            log = jobs.log(number)
            assert code == 0, log
            (run,) = (jobs.app(number) / "runs").iterdir()

        assert "x-api-key arrives" in log and "Authorization is taken away" in log and proxy.stripped > 0
        assert f"step {STEPS}/{STEPS}" in log and "exact McNemar p" in log
        results = json.loads((run / "eval/final_results.json").read_text())
        assert results["tasks"] == HELD_OUT and not results["base"]["ungraded"] + results["adapter"]["ungraded"]
        files = hub.repo(ADAPTER).files()
        assert {f"checkpoint-{STEPS}/{MANIFEST}", "adapter_model.safetensors", "eval/final_results.json"} <= set(files)
        assert files["adapter_model.safetensors"] == (run / "adapter/adapter_model.safetensors").read_bytes()

        # Sandboxes: as many as rollouts, each with its image and nothing secret, none left, their minutes counted.
        assert len(sandboxes.specs) >= STEPS * GROUP + 2 * HELD_OUT and sandboxes.most <= GROUP + 1
        assert {spec["dockerImage"] for spec in sandboxes.specs} == {hub_tasks.DOCKER_IMAGE}
        assert not any("HF_TOKEN" in environ or TOKEN in environ.values() for environ in sandboxes.environments)
        assert not any(TOKEN.encode() in content for _, content in sandboxes.written)
        assert [job for job in running(hub) if hub.jobs[job]["labels"].get("hf-sandbox")] == []
        assert f"sandboxes: {len(sandboxes.specs)} ran, 0 did not start" in log and "on cpu-basic, about $0.0" in log
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["sandboxes"]
        assert last["flavor"] == "cpu-basic" and 0 < last["started"] <= len(sandboxes.specs) and last["minutes"] > 0
        logs = {path.name: path.read_text(errors="replace") for path in (run / "logs").iterdir()}
        assert TOKEN not in log and not [name for name, text in logs.items() if TOKEN in text]
        # The end of a run ends rollouts that are under way; that is no fault, and nobody should have to look into it.
        told = ("RolloutAborted", "Exception in ASGI application")
        assert not [(name, word) for name, text in logs.items() for word in told if word in text]
