"""A Harbor environment without containers: one rollout is local processes in bubblewrap (or proot).

Inside, /workdir, /home/user, /logs, /tests, /tmp and a few more are the trial's own folders at these absolute paths;
/usr, /bin and /lib* are the machine's, read-only; /etc is a small one of ours; nothing else of the machine is there.
With bubblewrap the only address that can be reached is the capture proxy, under the same URL as outside.
Each `exec` has processes of its own that end with it: nothing the agent starts lives on into the verifier.
The task's image and Dockerfile are ignored; `environment/input` of a task appears as /home/user/input.

Used by import path: `EnvironmentConfig(import_path="recipe.sandbox_local:LocalSandbox", kwargs={...})`.

    python -m recipe.sandbox_local check [--runtime auto]     # which isolation works here, and what is lost
    python -m recipe.sandbox_local sweep --run-dir runs/x     # end and remove what a run left behind
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # the command line needs no Harbor
    from recipe.sandbox_cli import main

    sys.exit(main())

import asyncio
import contextlib
import os
import re
import signal
import uuid
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import effective_exec_cwd

from recipe.opencode_settings import MODELS_PATH, NO_MODELS
from recipe.sandbox_files import clear_after_proot, copy_file, copy_tree, inside, kill_marked, remove_tree
from recipe.sandbox_isolation import (
    AGENT_BIN,
    MARKER,
    MARKER_RUN,
    NOBODY,
    Network,
    SandboxError,
    detect,
    open_network,
    prepare_etc,
    sandbox_python,
)
from recipe.sandbox_process import relay, run

WORKDIR = "/workdir"
HOME = "/home/user"
INPUT = "/home/user/input"
LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
# Top-level folders a trial may write to; the root itself is read-only. "installed-agent", "solution" and "runtime"
# are Harbor's.
WRITABLE = ("workdir", "home", "logs", "tmp", "root", "app", "data", "installed-agent", "solution", "runtime")


class LocalSandbox(BaseEnvironment):
    """Harbor environment of local processes.

    Keyword arguments beyond Harbor's: `root` (folder of all sandboxes), `run_id` (mark of this run's processes),
    `runtime` (auto, bwrap, proot), `keep` (leave the folder after `stop`), `capture_port` (port of the capture proxy
    on this machine's loopback; None: no network), `opencode` (the agent's binary, put on PATH), `python` (the
    sandbox's python3; default /usr/bin/python3, else the one that runs us).
    """

    def __init__(self, *args: Any, root: str | Path, run_id: str = "", runtime: str = "auto", keep: bool = False,
                 capture_port: int | None = None, opencode: str | Path | None = None,
                 python: str | Path | None = None, **kwargs: Any) -> None:
        self._isolation = detect(runtime)  # before super().__init__, which asks for the capabilities
        super().__init__(*args, **kwargs)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", self.session_id)[-80:].lstrip(".-")
        self._root = Path(root).resolve()
        self.folder = self._root / f"{name}-{uuid.uuid4().hex[:8]}"
        self._run_id = run_id
        self._keep = keep
        self._capture_port = capture_port
        self._workdir = effective_exec_cwd(None, self.task_env_config.workdir, None) or WORKDIR
        self._writable = [*WRITABLE, *{PurePosixPath(p).parts[1] for p in [self._workdir, *self._mount_targets()]}]
        self._writable = list(dict.fromkeys(self._writable))
        self._path = [AGENT_BIN] if opencode else []
        self._binds = [(str(Path(opencode).resolve()), f"{AGENT_BIN}/opencode"),
                       (str(NO_MODELS), MODELS_PATH)] if opencode else []
        prefix, binary = sandbox_python(str(python) if python else None)
        if prefix:
            self._binds.append((prefix, prefix))
            self._path.append(str(Path(binary).parent))
        self._tests_uploaded = False
        self._etc: Path | None = None
        self._network: Network | None = None
        self._relay: asyncio.Server | None = None
        self._running: set[int] = set()

    @staticmethod
    def type() -> str:
        return "local-sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=self._isolation.own_network)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(fractional_cpus=True)

    def _validate_definition(self) -> None:
        """Nothing to find: a sandbox needs no image and no Dockerfile."""

    # -- life --------------------------------------------------------------------------------------------------
    async def start(self, force_build: bool) -> None:
        try:
            await asyncio.to_thread(self._make_folders)
            if self._capture_port and self._isolation.own_network:
                self._network = await asyncio.to_thread(open_network, self._capture_port)
                self._relay = await relay(self._network.listener, self._capture_port, self.logger)
            if not (self.environment_dir / "input").is_dir():
                await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    def _make_folders(self) -> None:
        self._etc = prepare_etc(self._root / ".etc")
        for name in (*self._writable, "tests"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for path in (HOME, self._workdir, *LOGS, *self._mount_targets(writable_only=True)):
            self._host(path).mkdir(parents=True, exist_ok=True)
        if (self.environment_dir / "input").is_dir():
            copy_tree(self.environment_dir / "input", self._host(INPUT), keep_links=True)
        (self.folder / "tmp").chmod(0o1777)
        self._give_away(self.folder)

    def _give_away(self, path: Path) -> None:
        """Under proot as root the guests run as nobody: what they use must be theirs."""
        if self._isolation.runtime != "proot" or os.geteuid() != 0:
            return
        for parent in self.folder.parents:
            if not parent.stat().st_mode & 0o001:
                raise SandboxError(f"proot runs the agent as nobody, who cannot enter {parent}: set RUN_DIR to a "
                                   "folder that every user can enter, or start as an ordinary user.")
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        for base, folders, files in os.walk(path):
            for name in (*folders, *files):
                os.chown(os.path.join(base, name), NOBODY, NOBODY, follow_symlinks=False)

    async def stop(self, delete: bool) -> None:
        for pid in list(self._running):
            self._kill(pid)
        if self._relay:
            self._relay.close()
        if self._network:
            self._network.close()
        self._relay = self._network = None
        if delete and not self._keep:
            await asyncio.to_thread(remove_tree, self.folder)

    # -- commands ----------------------------------------------------------------------------------------------
    async def exec(self, command: str, cwd: str | None = None, env: dict[str, str] | None = None,
                   timeout_sec: int | None = None, user: str | int | None = None) -> ExecResult:
        """Run `command` by bash. `user` is accepted and ignored: a sandbox has one user.

        Raises RuntimeError after `timeout_sec`, as Harbor's Docker environment does.
        """
        if self._etc is None:
            raise SandboxError("the sandbox is not running: call start() first")
        # Until the verifier uploads its tests the agent can neither read nor plant any.
        tests = ([], ["tests"]) if not self._tests_uploaded else (["tests"], [])
        argv = partial(
            self._isolation.argv, command, folder=self.folder, writable=[*self._writable, *tests[0]],
            read_only=tests[1], etc=self._etc, binds=self._binds, cwd=cwd or self._workdir, network=self._network)
        return await run(lambda fd: argv(fd=fd), self._environ(env), timeout_sec, running=self._running,
                         on_output=self._output_callback(), kill=self._kill, reports=not self._isolation.own_network)

    def _kill(self, pid: int) -> None:
        """End a command's processes; bubblewrap's process namespace ends with its first process, proot has none."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if self._isolation.runtime == "proot":
            kill_marked(self.folder)
            clear_after_proot(pid)

    def _environ(self, env: dict[str, str] | None) -> dict[str, str]:
        """The whole environment of a command: nothing is inherited from the env server."""
        path = ":".join([*self._path, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"])
        base = {"PATH": path, "HOME": HOME, "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "TMPDIR": "/tmp",
                "LANG": "C.UTF-8", "TERM": "dumb", "PYTHONNOUSERSITE": "1"}
        return base | (self._merge_env(env) or {}) | {MARKER: str(self.folder), MARKER_RUN: self._run_id}

    # -- files -------------------------------------------------------------------------------------------------
    def _host(self, path: str) -> Path:
        top = PurePosixPath(path).parts[1:2]
        if not top or top[0] not in (*self._writable, "tests"):
            raise SandboxError(f"{path!r} is not a folder of the sandbox: only /{', /'.join(self._writable)} and "
                               "/tests can be written.")
        return inside(self.folder, path)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = self._upload_target(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(copy_file, Path(source_path).resolve(), target)
        self._give_away(target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        target = self._upload_target(target_dir)
        await asyncio.to_thread(copy_tree, Path(source_dir), target, keep_links=True)
        self._give_away(target)

    def _upload_target(self, path: str) -> Path:
        target = self._host(path)
        if PurePosixPath(path).parts[1] == "tests" and not self._tests_uploaded:
            # Whatever lies there came from the agent (proot cannot write-protect it): the verifier starts clean. Its
            # log folder too: a link or a mode left there would keep it from writing, and the rollout from its grade.
            (self.folder / "logs").chmod(0o755)
            for name in ("tests", "logs/verifier"):
                folder = self.folder / name
                if folder.is_symlink() or not folder.is_dir():
                    folder.unlink(missing_ok=True)
                remove_tree(folder)
                folder.mkdir()
            self._give_away(self.folder / "logs/verifier")
            self._tests_uploaded = True
        return target

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(copy_file, self._host(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        source = self._host(source_dir)
        if source.is_symlink():
            raise SandboxError(f"{source_dir!r} is a link made in the sandbox; it is not followed")
        left_out = await asyncio.to_thread(copy_tree, source, Path(target_dir))
        if left_out:
            self.logger.debug(f"links and special files of {source_dir} were not downloaded: {left_out[:20]}")

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        with contextlib.suppress(SandboxError):
            host = self._host(path)
            return host.is_dir() and not host.is_symlink()
        return await super().is_dir(path, user)

    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        with contextlib.suppress(SandboxError):
            host = self._host(path)
            return host.is_file() and not host.is_symlink()
        return await super().is_file(path, user)
