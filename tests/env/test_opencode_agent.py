"""Installing OpenCode in a sandbox: the script that runs there, run here with stand-ins for curl and sleep."""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import subprocess
from pathlib import Path

import pytest
from harbor.environments.base import ExecResult
from test_opencode_binary import tarball

from recipe.opencode_agent import PinnedOpenCode
from recipe.opencode_binary import MEMBER
from recipe.opencode_settings import MODELS_PATH


class Machine:
    """Stands for a sandbox: runs commands in bash with `bin` first on PATH, and /usr/local/bin and /opt in `root`."""

    def __init__(self, root: Path) -> None:
        self.bin, self.target, self.calls = root / "bin", root / "local", root / "calls"
        self.models = root / MODELS_PATH.lstrip("/")
        self.bin.mkdir()
        self.target.mkdir()
        self.calls.touch()
        self.command("sleep", "exit 0")

    def command(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\necho {name} >> {shlex.quote(str(self.calls))}\n{script}\n")
        (self.bin / name).chmod(0o755)

    async def exec(self, command: str, **_: object) -> ExecResult:
        command = command.replace("/usr/local/bin", str(self.target)).replace(MODELS_PATH, str(self.models))
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600,
                              env={"PATH": f"{self.bin}:{self.target}:/usr/bin:/bin", "HOME": str(self.bin)})
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)

    def count(self, name: str) -> int:
        return self.calls.read_text().split().count(name)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def agent(tmp_path: Path, data: bytes | None) -> PinnedOpenCode:
    download = data and {"url": "https://registry.example/opencode.tgz", "member": MEMBER,
                         "sha512": hashlib.sha512(data).hexdigest()}
    return PinnedOpenCode(logs_dir=tmp_path, model_name="intercepted/m", version="9.9.9", download=download)


def serve(machine: Machine, tmp_path: Path, data: bytes, failures: int = 0) -> None:
    """A curl that fails `failures` times with a cut file and then delivers `data` to the file named after -o."""
    (tmp_path / "data").write_bytes(data)
    machine.command("curl", f"""
while [ "$1" != -o ]; do shift; done
if [ "$(grep -c '^curl$' {machine.calls})" -le {failures} ]; then head -c 20 {tmp_path}/data > "$2"; exit 18; fi
cp {tmp_path}/data "$2" """)


def install(machine: Machine, made: PinnedOpenCode) -> None:
    asyncio.run(made.install(machine))


def test_installs_the_pinned_file_and_not_twice(machine, tmp_path):
    serve(machine, tmp_path, tarball())
    made = agent(tmp_path, tarball())
    install(machine, made)
    assert subprocess.check_output([machine.target / "opencode"], text=True) == "9.9.9\n"
    install(machine, made)
    assert machine.count("curl") == 1
    assert machine.models.read_text() == "{}", "else the agent builds its list of thousands of models at every start"


def test_cut_downloads_are_tried_again(machine, tmp_path):
    serve(machine, tmp_path, tarball(), failures=2)
    install(machine, agent(tmp_path, tarball()))
    assert machine.count("curl") == 3 and (machine.target / "opencode").is_file()


def test_another_file_than_the_pinned_one_is_not_installed(machine, tmp_path):
    serve(machine, tmp_path, tarball())
    with pytest.raises(RuntimeError, match="did not arrive with the pinned hash"):
        install(machine, agent(tmp_path, b"the pinned file"))
    assert machine.count("curl") == 4 and not (machine.target / "opencode").exists()


def test_local_sandbox_without_the_binary_is_named(machine, tmp_path):
    with pytest.raises(RuntimeError, match="no opencode on PATH"):
        install(machine, agent(tmp_path, None))
    machine.command("opencode", "exit 0")
    install(machine, agent(tmp_path, None))
    assert machine.count("opencode") == 0, "looking it up is enough: starting it costs half a second a rollout"
