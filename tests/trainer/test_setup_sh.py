"""setup.sh: a failed installation is never taken for an environment."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from recipe.config import REPO
from recipe.environments import read_pins

MAKE = 'source ./setup.sh; python=$(make_env broken "$(command -v python3)" "$1") || exit 69; echo "made $python"'


def test_a_failed_installation_ends_set_up_and_leaves_no_finished_environment(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"missing @ file://{tmp_path}/no-such-wheel-1.0-py3-none-any.whl\nalso==1\n")
    done = subprocess.run(["bash", "-c", MAKE, "bash", str(requirements)], cwd=REPO, capture_output=True, text=True,
                          env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path), "INSTALLER": "pip",
                               "CACHE_PATH": str(tmp_path / "cache")})
    assert done.returncode == 69, done.stderr
    assert "made" not in done.stdout and "Run the same command again" in done.stderr
    assert not list(tmp_path.glob("cache/envs/*/.complete"))


def test_a_python_without_ensurepip_makes_an_environment_with_its_own_pip(tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without/ensurepip.py").write_text("raise ImportError('as in an image without the venv package')")
    wheel, info = tmp_path / "demo-1.0-py3-none-any.whl", "demo-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    (tmp_path / "requirements.txt").write_text(f"demo @ file://{wheel}\nnothing==0 ; python_version < '3'\n")
    done = subprocess.run(
        ["bash", "-c", MAKE.replace("$(command -v python3)", "$(find_python env 11)"), "bash",
         str(tmp_path / "requirements.txt")],
        cwd=REPO, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "INSTALLER": "pip", "PIP_NO_INDEX": "1",
             "PYTHONPATH": str(tmp_path / "without"), "CACHE_PATH": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    site = next((tmp_path / "cache/envs").glob("broken-*/lib/python*/site-packages"))
    assert [p.name for p in site.iterdir()] == ["demo-1.0.dist-info"]


def test_a_backend_with_an_sdk_has_a_lock_of_its_own_and_the_same_openenv_and_harbor():
    def lock(sandbox: str) -> str:
        done = subprocess.run(["bash", "-c", 'source ./setup.sh; env_lock "$1"', "bash", sandbox], cwd=REPO,
                              capture_output=True, text=True, check=True)
        return done.stdout.strip()

    stock = lock("hf-sandbox")
    assert stock == lock("local") == str(REPO / "requirements/env-server.txt")
    pins = read_pins(Path(stock))
    for sandbox in ("daytona", "e2b"):
        more = read_pins(Path(lock(sandbox)))
        assert sandbox in more and sandbox not in pins
        assert {name: more[name] for name in ("openenv", "harbor", "huggingface-hub")} == {
            name: pins[name] for name in ("openenv", "harbor", "huggingface-hub")}


def test_a_machine_without_vllm_is_told_so_before_anything_is_made(tmp_path):
    python = tmp_path / "bin/python3"  # -S: without packages, also where this machine's has a vLLM
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')
    python.chmod(0o755)
    environ = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x"}
    done = subprocess.run(["bash", "setup.sh"], cwd=REPO, capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 69 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    for what in ("there is no vLLM here", "vllm/vllm-openai:v0.31.0", "ENVIRONMENTS=present", "--local"):
        assert what in line
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("given", "code", "said"), [
    ({"CACHE_DIR": "/proc/none"}, 64, "/proc/none cannot be made or written: set CACHE_DIR to a folder that can"),
    ({"TRAINER_PYTHON": "/no/python"}, 64, "TRAINER_PYTHON=/no/python is no program of this machine"),
    ({"OPENCODE_BIN": "/no/opencode"}, 64, "OPENCODE_BIN=/no/opencode is no program of this machine"),
    ({"INSTALLER": "conda"}, 64, "INSTALLER=conda: must be auto, pip or uv"),
    ({"TRAINER_BASE_PYTHON": "/no/python"}, 69, "no Python >= 3.11 with venv was found for the trainer at /no/python"),
    ({"ENV_BASE_PYTHON": "/no/python"}, 69, "no Python >= 3.12 with venv was found for the env at /no/python")])
def test_what_is_wrong_is_said_before_anything_is_made(given, code, said, tmp_path):
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CACHE_DIR": str(tmp_path / "cache")} | given
    done = subprocess.run(["bash", "setup.sh", "--local"], cwd=REPO, capture_output=True, text=True, env=environ,
                          timeout=60)
    assert done.returncode == code and said in done.stderr and done.stderr.count("[setup]") == 1, done.stderr
    assert not (tmp_path / "cache/envs").exists()
