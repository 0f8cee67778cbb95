"""The job's own command, as launch.py builds it, where there is neither `python` nor `git`: only `python3`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_double import HubDouble, hub_environ
from loopback import job_ports
from test_launch import CODE, launch, launcher, world  # noqa: F401 (fixtures)

from recipe.config import REPO

ABSENT = ("python", "git", "pip", "hf", "uv")  # by name or as the beginning of one


@pytest.fixture
def image_path(tmp_path: Path) -> Path:
    """A folder for PATH: this machine's programs without ABSENT, and the python3, pip and hf of the image."""
    folder = tmp_path / "path"
    folder.mkdir()
    for source in ("/usr/sbin", "/sbin", "/usr/bin", "/bin"):
        for program in Path(source).glob("*"):
            if not program.name.startswith(ABSENT) and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    (folder / "python3").symlink_to(os.path.realpath(sys._base_executable))
    for script in ("pip", "hf"):
        (folder / script).symlink_to(Path(sys.executable).parent / script)
    found = subprocess.run(["bash", "-c", "command -v python git"], env={"PATH": str(folder)}, capture_output=True)
    assert found.stdout == b"", found.stdout
    return folder


def test_the_job_starts_from_the_downloaded_code_with_python3_alone(
        world: HubDouble, launcher: str, tmp_path: Path, image_path: Path):  # noqa: F811
    world.repo("me/adapter")
    submitted = launch(launcher, world, tmp_path, "--submit")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    (job,) = world.jobs.values()
    app, run = tmp_path / "app", tmp_path / "run"
    shell, option, command = job["spec"]["command"]
    given = {name: os.environ[name] for name in ("TRAINER_PYTHON", "ENV_PYTHON", "OPENCODE_BIN")}
    done = subprocess.run(
        [shell, option, command.replace("/app", str(app))], cwd=tmp_path, text=True, timeout=1800,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env=given | job_ports() | job["spec"]["environment"] | hub_environ(world, tmp_path / "home") | {
            "PATH": str(image_path), "HOME": str(tmp_path), "RUN_DIR": str(run), "ENGINE": "cpu"})
    # The double has no task files, so the job ends there, with all of set-up behind it.
    assert done.returncode == 69, done.stdout
    assert "not found" not in done.stdout.replace("Entry not found", ""), done.stdout
    for text in ("trainer: Python 3.", "env server: Python 3.", "[seam] checking", "[watchdog] guarding",
                 "step 'tasks' failed", "FineEnvs/SmolDataEnvs-harbor-train@4719635", f"Resume with: RUN_DIR={run}"):
        assert text in done.stdout, f"{text!r} is missing:\n{done.stdout}"
    assert "WRONG" not in done.stdout
    assert (app / "data/train.json").read_bytes() == (REPO / "data/train.json").read_bytes()
    assert world.count(f"GET /{CODE}/resolve/.*run_job.sh") == 1
