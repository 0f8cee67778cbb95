"""What lies around a job: npm's registry with the agent's package, tasks as the recipe's datasets have them, a Job."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import requests
from hub_double import TOKEN, HubDouble
from jobs_proxy import JobsProxy, LoopbackServer

from recipe import local_tasks, opencode_binary
from recipe.config import REPO, Settings


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Quiet."""


class Registry(LoopbackServer):
    """npm's registry with one package: the agent's binary, not compressed, which saves seconds here."""

    def __init__(self, folder: Path, binary: str) -> None:
        version = Settings().opencode_version
        name = opencode_binary.PACKAGE
        self.package = folder / name / "-" / f"{name}-{version}.tgz"
        self.package.parent.mkdir(parents=True)
        with tarfile.open(self.package, "w:gz", compresslevel=0) as archive:
            archive.add(binary, opencode_binary.MEMBER)
        with self.package.open("rb") as file:
            digest = hashlib.file_digest(file, "sha512").digest()
        self.integrity = "sha512-" + base64.b64encode(digest).decode()
        super().__init__(partial(_Files, directory=str(folder)))


def task_files(task: local_tasks.LocalTask) -> dict[str, str]:
    """A local task in the shape of a published one: its data comes by the health check, as from a bucket."""
    files = local_tasks.files(task)
    csv = files.pop(f"environment/input/{task.file_name}")
    data = base64.b64encode(csv.encode()).decode()
    target = f"{local_tasks.INPUT_DIR}/{task.file_name}"
    files["environment/pull_bucket.py"] = "# stands for the download of the task's data\n"
    files["task.toml"] += f"""
[environment.env]
HF_TOKEN = "${{HF_TOKEN}}"

[environment.healthcheck]
command = "mkdir -p {local_tasks.INPUT_DIR} && echo {data} | base64 -d > {target}"
timeout_sec = 60
retries = 3
"""
    return files


def bundle(folder: Path) -> Path:
    """A copy of the checkout, as a user has it who brings tasks of their own. Nobody else compiles modules in it."""
    copy = folder / "checkout"
    tracked = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=REPO, text=True,
                             capture_output=True, check=True).stdout.split()
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / name, copy / name)
    return copy


def public_job(hub: HubDouble, proxy: JobsProxy, port: int) -> str:
    """Id of a running Job with one public port, which is `port` of this machine."""
    answer = requests.post(f"{hub.url}/api/jobs/{hub.user}", headers={"Authorization": f"Bearer {TOKEN}"}, json={
        "dockerImage": "image", "command": ["bash"], "environment": {}, "flavor": "h200x2",
        "expose": {"ports": [port], "portsPublic": [port]}}, timeout=30)
    number = answer.json()["id"]
    proxy.targets[number, port] = (port, "")
    return number


def until(what: Callable[[], object], seconds: float = 180) -> None:
    """Waits for an event, as long as a loaded machine may need."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)
