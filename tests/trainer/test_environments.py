"""The report of what each process imports, on environments whose packages are only named, not there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipe import environments
from recipe.config import REPO, Settings

MAKE = ('source ./setup.sh; python=$(make_env top "$(command -v python3)" "$1" --system-site-packages) || exit 69; '
        'echo "made $python"')


@dataclass
class Site:
    """A virtual environment in which packages can be put and taken away."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def put(self, **versions: str) -> None:
        for name, version in versions.items():
            for old in self.packages.glob(f"{name}-*.dist-info"):
                (old / "METADATA").unlink()
                old.rmdir()
            info = self.packages / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (self.packages / name).mkdir(exist_ok=True)
            (self.packages / name / "__init__.py").touch()


def make_site(folder: Path, pins: str, **more: str) -> Site:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Site(folder)
    site.put(**environments.read_pins(REPO / "requirements" / pins), **more)
    return site


@pytest.fixture
def image(tmp_path) -> dict[str, Site]:
    """The three interpreters of the job: the trainer's on top of the image's packages, as in the image."""
    sites = {"policy": make_site(tmp_path / "image", "image.txt", transformers="5.17.0", mcp="2.3.0"),
             "trainer": make_site(tmp_path / "trainer", "trainer-job.txt"),
             "env": make_site(tmp_path / "env", "env-server.in", fastmcp="3.4.11", mcp="1.30.0")}
    (sites["trainer"].packages / "image.pth").write_text(f"{sites['policy'].packages}\n")
    vllm = tmp_path / "image/bin/vllm"
    vllm.write_text(f"#!{sites['policy'].python}\n")
    vllm.chmod(0o755)
    return sites


def report(sites: dict[str, Site], *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipe.environments", "--quick", *arguments], cwd=REPO, capture_output=True, text=True,
        env={"PATH": f"{sites['policy'].folder}/bin:/usr/bin:/bin", "PRESET": "job",
             "TRAINER_PYTHON": str(sites["trainer"].python), "ENV_PYTHON": str(sites["env"].python)} | env)


def test_one_line_a_process_as_the_readme_shows_it(image):
    done = report(image)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["policy server", "trainer", "env server"]
    assert f"vllm 0.31.0, torch 2.13.0, transformers 5.17.0, mcp 2.3.0 ({image['policy'].python})" in lines[0]
    assert "trl 1.15.0" in lines[1] and "mcp 1.30.0" in lines[1] and "torch 2.13.0, vllm 0.31.0" in lines[1]
    assert "openenv 0.10.0, harbor 0.25.0" in lines[2]
    shown = (REPO / "README.md").read_text(encoding="utf-8")
    for line in lines:
        versions = re.search(r"Python \S+, (.*) \(", line)[1]
        assert versions in shown, f"README.md shows other versions than: {versions}"


@pytest.mark.parametrize(("where", "put", "wrong", "to_do"), [
    ("policy", {"vllm": "0.30.0"}, "vllm is 0.30.0, expected 0.31.0", "image=vllm/vllm-openai:v0.31.0"),
    ("trainer", {"trl": "1.16.0"}, "trl is 1.16.0, expected 1.15.0", "requirements/trainer-job.txt"),
    ("trainer", {"torch": "2.14.1"}, "torch is 2.14.1 in ", "requirements/trainer-job.txt"),
    ("trainer", {"torch": "2.13.0"}, "the trainer must use the image's own", "requirements/trainer-job.txt"),
    ("env", {"harbor": "0.26.0"}, "harbor is 0.26.0, expected 0.25.0", "requirements/env-server.txt"),
])
def test_another_version_is_named_with_what_to_do(image, where, put, wrong, to_do):
    if "torch" in put:
        below = image["policy"].packages
        (image["trainer"].packages / "image.pth").write_text(f"import sys; sys.path.append('{below}')\n")
    image[where].put(**put)
    done = report(image)
    assert done.returncode == 69, done.stdout
    assert wrong in done.stdout and done.stdout.count("WRONG") == 1
    (advice,) = [line for line in done.stdout.splitlines() if "TO DO" in line]
    assert to_do in advice and str(image[where].folder) in advice


def test_environments_that_are_there_already_are_taken_as_they_are(image):
    image["policy"].put(vllm="0.26.0")
    done = report(image, ENVIRONMENTS="present")
    assert done.returncode == 0 and "differs: vllm is 0.26.0, expected 0.31.0" in done.stdout, done.stdout
    image["env"].python.unlink()
    assert report(image, ENVIRONMENTS="present").returncode == 69, "an interpreter that does not run is no version"


def test_packages_in_a_folder_of_pythonpath_are_found(image, tmp_path):
    """vLLM and the rest, unpacked into a folder, as serve_policy.sh and the trainer find them too."""
    (image["trainer"].packages / "image.pth").unlink()
    shutil.copytree(image["policy"].packages, tmp_path / "unpacked")
    done = report(image, "--only", "trainer", ENVIRONMENTS="present", PYTHONPATH=str(tmp_path / "unpacked"))
    assert "torch 2.13.0, vllm 0.31.0" in done.stdout, done.stdout


def test_what_is_not_there_at_all(image):
    (image["policy"].folder / "bin/vllm").unlink()
    image["env"].python.unlink()
    done = report(image, PATH=f"{image['env'].folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin")
    assert done.returncode == 69
    assert "vllm is missing, expected 0.31.0" in done.stdout and "set ENGINE=cpu" in done.stdout
    assert "env server: Python does not run" in done.stdout and "No such file" in done.stdout
    assert f"{image['env'].python} does not run: " in done.stdout and "harbor is missing" not in done.stdout


def test_the_cpu_engine_needs_no_vllm(image):
    done = report(image, ENGINE="cpu")
    assert "policy server" not in done.stdout and "requirements/trainer.txt" in done.stdout


def test_the_machine_of_the_env_server_needs_no_trainer(image):
    (image["policy"].folder / "bin/vllm").unlink()
    done = report(image, "--only", "env server", TRAINER_PYTHON="")
    assert done.returncode == 0 and done.stdout.startswith("env server: ") and done.stdout.count("\n") == 1
    done = report(image, TRAINER_PYTHON="")
    assert done.returncode == 69 and "no interpreter is named for trainer" in done.stderr


def test_a_module_that_fails_to_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise SystemExit('no libcudart')")
    monkeypatch.syspath_prepend(tmp_path)
    facts = environments.look(["pytest", "no-such"], ["broken", "json"])
    assert facts["packages"]["no-such"] == [None, ""] and facts["packages"]["pytest"][0]
    assert facts["failed"] == {"broken": "SystemExit: no libcudart"}
    process = environments.Process("env server", sys.executable, "env-server.in", ("broken",), "nothing")
    facts["packages"] = {name: [version, ""] for name, version in process.expected().items()}
    assert environments.problems(process, facts) == ["import broken fails with SystemExit: no libcudart"]


def test_every_module_of_the_report_exists_here():
    """The trainer's are imported; those of the image and of the env server are named in places that exist."""
    trainer, env = environments.processes(Settings.load({"PRESET": "local"}), sys.executable, sys.executable)
    assert environments.look([], [m for m in trainer.modules])["failed"] == {}
    for module in env.modules:
        if module.startswith("recipe."):
            assert (REPO / f"{module.replace('.', '/')}.py").is_file()


def test_an_environment_on_top_keeps_the_torch_below(tmp_path):
    below = tmp_path / "below"
    (below / "torch-1.0.dist-info").mkdir(parents=True)
    (below / "torch-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    (below / "ensurepip.py").write_text("raise ImportError")  # faster, and images have Pythons without it
    wheel, info = tmp_path / "demo-1.0-py3-none-any.whl", "demo-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\nRequires-Dist: torch\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"demo @ file://{wheel}\nnothing==0 ; python_version < '3'\n")
    uv = tmp_path / "bin/uv"  # does not see the packages below, so it must not be taken
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\nexit 9\n")
    uv.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", MAKE, "bash", str(requirements)], cwd=REPO, capture_output=True, text=True,
        env={"PATH": f"{uv.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(below),
             "PIP_NO_INDEX": "1", "CACHE_PATH": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    assert "on top of its torch==1.0" in done.stderr
    site = next((tmp_path / "cache/envs").glob("top-*/lib/python*/site-packages"))
    assert (site / "demo-1.0.dist-info").is_dir() and not (site / "torch").exists()
    assert (site.parents[2] / "keep.txt").read_text() == "torch==1.0\n"
