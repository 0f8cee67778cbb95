"""Runs the Jobs of the Hub's double on this machine: their command as it was submitted, in their own environment.

A Job sees what the platform gives it (JOB_ID, ACCELERATOR, …), what it was submitted with, and nothing of the caller's.
The image is `tools` on PATH; /app is a folder. `world` stands for the network: where Hub, registry and proxy are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from hub_double import HubDouble
from jobs_proxy import JobsProxy


class JobRunner:
    """`with JobRunner(...)`: Jobs that are no sandboxes run; `wait(job)` gives the exit code, `log(job)` the output."""

    def __init__(self, hub: HubDouble, proxy: JobsProxy, folder: Path, tools: Path, world: dict[str, str]) -> None:
        self.hub, self.proxy, self.folder, self.tools, self.world = hub, proxy, folder, tools, world
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.waiters: list[threading.Thread] = []

    def __enter__(self) -> JobRunner:
        self.hub.on_job.append(self.begin)
        self.hub.on_end.append(self.end)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.processes:
            self.end(number, signal.SIGKILL)
        for waiter in self.waiters:
            waiter.join()
        self.hub.on_job.remove(self.begin)
        self.hub.on_end.remove(self.end)

    def app(self, number: str) -> Path:
        return self.folder / number / "app"

    def log(self, number: str) -> str:
        return (self.folder / number / "log").read_text(errors="replace")

    def begin(self, number: str, job: dict[str, Any]) -> None:
        if job["labels"].get("hf-sandbox") == "1":
            return
        spec = job["spec"]
        (self.folder / number / "home").mkdir(parents=True)
        for path in (self.folder, self.folder / number):
            path.chmod(0o755)
        for port in spec["expose"]["ports"]:
            self.proxy.targets[number, port] = (port, "")
        public = spec["expose"]["portsPublic"][0]
        environ = {"PATH": f"{self.tools}:/usr/local/bin:/usr/bin:/bin", "HOME": str(self.folder / number / "home"),
                   "JOB_ID": number, "ACCELERATOR": spec["flavor"], "CPU_CORES": "2", "MEMORY": "8Gi",
                   "PUBLIC_URL": self.proxy.address(number, public), **self.world, **spec["environment"],
                   **spec["secrets"]}
        command = [part.replace("/app", str(self.app(number))) for part in spec["command"]]
        with (self.folder / number / "log").open("wb") as output:
            self.processes[number] = subprocess.Popen(
                command, env=environ, cwd=self.folder / number, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True)
        waiter = threading.Thread(target=self._watch, args=(number,))
        waiter.start()
        self.waiters.append(waiter)

    def _watch(self, number: str) -> None:
        code = self.processes[number].wait()
        if self.hub.jobs[number]["status"]["stage"] == "RUNNING":
            self.hub.jobs[number]["status"] = {"stage": "ERROR" if code else "COMPLETED", "message": f"exit {code}"}

    def end(self, number: str, signum: int = signal.SIGTERM) -> None:
        if number in self.processes and self.processes[number].poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.processes[number].pid, signum)

    def wait(self, number: str, seconds: float) -> int:
        return self.processes[number].wait(seconds)
