"""A double of HF Sandboxes: the Jobs are the Hub double's, the machine of each is local processes in a folder.

It answers what huggingface_hub's `Sandbox` asks of the server inside the Job (protocol 2: /health, exec as a stream of
JSON lines, files), behind the JobsProxy and for the Job's own token only. A sandbox sees no environment but what the
Job and each command were given; all of it is noted, so that a test can look for secrets. `fail_starts` makes the next
Jobs end before they are ready; the Hub double's `fail` makes the Jobs API refuse them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hub_double import HubDouble
from jobs_proxy import JobsProxy, LoopbackServer

from recipe.sandbox_isolation import detect, prepare_etc, sandbox_python

SERVER_PORT = 49983
# Folders that a root user finds writable in a container; the machine's /usr is the image, but for /usr/local/bin.
WRITABLE = ("workdir", "home", "logs", "tmp", "root", "app", "data", "opt", "tests", "installed-agent", "solution")


class HostNetwork:
    """Stands for a container's network: an HF Sandbox reaches the internet, here the doubles on loopback."""

    def enter(self) -> list[str]:
        return []


@dataclass(eq=False)
class Machine:
    folder: Path
    token: str
    spec: dict[str, Any]
    running: set[int] = field(default_factory=set)
    commands: list[str] = field(default_factory=list)


class SandboxDouble(LoopbackServer):
    """`with SandboxDouble(hub, proxy, folder)`: Jobs of `hub` that are sandboxes get a machine under `folder`."""

    def __init__(self, hub: HubDouble, proxy: JobsProxy, folder: Path) -> None:
        self.hub, self.proxy, self.folder = hub, proxy, folder
        self.machines: dict[str, Machine] = {}
        self.specs: list[dict[str, Any]] = []  # of every sandbox ever asked for
        self.environments: list[dict[str, str]] = []  # of every command
        self.written: list[tuple[str, bytes]] = []  # every uploaded file
        self.most = 0  # sandboxes at once
        self.fail_starts = 0
        self.isolation = detect()
        self.python, self.binary = sandbox_python()
        super().__init__(_handler(self))

    def __enter__(self) -> SandboxDouble:
        self.hub.on_job.append(self.begin)
        self.hub.on_end.append(self.end)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self.hub.on_job.remove(self.begin)
        self.hub.on_end.remove(self.end)
        for job in [*self.machines]:
            self.end(job)
        super().__exit__()

    # -- life of a machine -----------------------------------------------------------------------------------------
    def begin(self, number: str, job: dict[str, Any]) -> None:
        spec = job["spec"]
        if job["labels"].get("hf-sandbox") != "1":
            return
        self.specs.append(spec)
        job["status"]["exposeUrls"] = [self.proxy.address(number, SERVER_PORT)]
        if self.fail_starts > 0:
            self.fail_starts -= 1
            job["status"] |= {"stage": "ERROR", "message": "the image could not be pulled"}
            return
        folder = self.folder / number
        for name in (*WRITABLE, "usr-local-bin"):
            (folder / name).mkdir(parents=True)
            (folder / name).chmod(0o1777)
        self.machines[number] = Machine(folder, spec["secrets"]["SBX_TOKEN"], spec)
        self.most = max(self.most, len(self.machines))
        self.proxy.targets[number, SERVER_PORT] = (self.port, f"/{number}")

    def end(self, number: str) -> None:
        machine = self.machines.pop(number, None)
        self.proxy.targets.pop((number, SERVER_PORT), None)
        if machine is None:
            return
        for pid in [*machine.running]:
            _kill(pid)
        shutil.rmtree(machine.folder, ignore_errors=True)

    def argv(self, machine: Machine, command: str, cwd: str) -> list[str]:
        binds = [(self.python, self.python)] if self.python else []
        made = self.isolation.argv(
            command, folder=machine.folder, writable=WRITABLE, read_only=(), etc=prepare_etc(self.folder / ".etc"),
            binds=binds, cwd=cwd, network=HostNetwork())
        # The agent is installed into /usr/local/bin.
        host = str(machine.folder / "usr-local-bin")
        bwrap = self.isolation.runtime == "bwrap"
        at = made.index("--remount-ro" if bwrap else "-w")
        return [*made[:at], *(["--bind", host, "/usr/local/bin"] if bwrap else ["-b", f"{host}:/usr/local/bin"]),
                *made[at:]]

    def environ(self, machine: Machine, extra: dict[str, str]) -> dict[str, str]:
        path = ":".join(([f"{self.python}/bin"] if self.python else []) +
                        ["/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"])
        given = {**machine.spec["environment"], **machine.spec["secrets"]}
        base = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8"} | {
            k: v for k, v in given.items() if not k.startswith("SBX_")}
        made = base | {k: str(v) for k, v in extra.items()}
        self.environments.append(made)
        return made


def _make(path: Path, root: Path) -> None:
    """A folder and those above it, for everybody: under proot the commands run as nobody."""
    path.mkdir(parents=True, exist_ok=True)
    while path not in (root, root.parent):
        path.chmod(0o777)
        path = path.parent


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _handler(double: SandboxDouble) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def _route(self) -> None:
            url = urlsplit(self.path)
            _, number, rest = url.path.split("/", 2)
            self.query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            machine = double.machines.get(number)
            if machine is None:
                return self._send(404, {"error": "no such sandbox"})
            if rest == "health":
                return self._send(200, {"protocol": 2, "version": "0.6.0"})
            if self.headers.get("X-Sandbox-Token") != machine.token:
                return self._send(403, {"error": "wrong sandbox token"})
            action = {"v1/exec": self._exec, "v1/files/write": self._write, "v1/files/read": self._read,
                      "v1/files/stat": self._stat, "v1/files/mkdir": self._mkdir}.get(rest)
            if action is None:
                return self._send(404, {"error": f"the double knows no {self.command} {rest}"})
            try:
                action(machine)
            except FileNotFoundError as err:
                self._send(404, {"error": str(err)})
            except OSError as err:
                self._send(500, {"error": str(err)})

        def _host(self, machine: Machine) -> Path:
            path = Path(os.path.normpath(self.query["path"]))
            if path.parts[1:2] == ("usr",):
                raise OSError(f"{path}: read-only file system")
            return machine.folder / path.relative_to("/")

        def _exec(self, machine: Machine) -> None:
            wanted = json.loads(self.body)
            command = wanted["cmd"] if isinstance(wanted["cmd"], str) else wanted["cmd"][-1]
            machine.commands.append(command)
            process = subprocess.Popen(
                double.argv(machine, command, wanted.get("cwd") or "/workdir"), cwd="/", start_new_session=True,
                env=double.environ(machine, wanted.get("env") or {}), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            machine.running.add(process.pid)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-ndjson")
            self.end_headers()
            lock = threading.Lock()

            def event(**fields: Any) -> None:
                with lock:
                    try:
                        self.wfile.write(json.dumps(fields).encode() + b"\n")
                        self.wfile.flush()
                    except OSError:
                        _kill(process.pid)  # the caller went away

            def read(name: str, stream: Any) -> None:
                while chunk := stream.read1(65536):
                    event(event=name, data=chunk.decode(errors="replace"))

            readers = [threading.Thread(target=read, args=pair) for pair in
                       (("stdout", process.stdout), ("stderr", process.stderr))]
            for reader in readers:
                reader.start()
            deadline = time.monotonic() + (wanted.get("timeout") or 1e9)
            pinged, timed_out = time.monotonic(), False
            while process.poll() is None:
                time.sleep(0.05)
                if time.monotonic() > deadline:
                    timed_out = True
                    _kill(process.pid)
                if time.monotonic() - pinged > 15:
                    pinged = time.monotonic()
                    event(event="ping")
            _kill(process.pid)  # what the command left running, so that the pipes end
            for reader in readers:
                reader.join()
            machine.running.discard(process.pid)
            if machine in double.machines.values():
                event(event="exit", exit_code=process.returncode, timed_out=timed_out)

        def _write(self, machine: Machine) -> None:
            target = self._host(machine)
            _make(target.parent, machine.folder)
            double.written.append((self.query["path"], self.body))
            if "offset" not in self.query:
                target.write_bytes(self.body)
            else:
                with os.fdopen(os.open(target, os.O_RDWR | os.O_CREAT), "r+b") as file:
                    file.seek(int(self.query["offset"]))
                    file.write(self.body)
                    if "truncate_to" in self.query:
                        file.truncate(int(self.query["truncate_to"]))
            self._send(200, {})

        def _read(self, machine: Machine) -> None:
            data = self._host(machine).read_bytes()
            start = int(self.query.get("offset", 0))
            self._send(200, data[start:start + int(self.query.get("length", len(data)))])

        def _stat(self, machine: Machine) -> None:
            path = self._host(machine)
            self._send(200, {"name": path.name, "path": self.query["path"], "size": path.stat().st_size,
                             "type": "dir" if path.is_dir() else "file"})

        def _mkdir(self, machine: Machine) -> None:
            _make(self._host(machine), machine.folder)
            self._send(200, {})

        def _send(self, status: int, payload: Any) -> None:
            body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = _route

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler
