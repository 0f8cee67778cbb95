"""The printed command does resume: in an empty environment it leads to the same settings, and it holds no secret."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from recipe import resume_command
from recipe.config import REPO, Settings

SHOW = f"""
if [[ ${{*: -1}} == --local ]]; then export PRESET=local; fi
cd {shlex.quote(str(REPO))}
python3 -m recipe.config export
echo "export TORCH_INDEX=${{TORCH_INDEX:-}} TRAINER_PYTHON=${{TRAINER_PYTHON:-}}"
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "show me.sh"
    file.write_text(SHOW)
    return shlex.quote(str(file))


def run(command: str, environ: dict[str, str]) -> dict[str, str]:
    """What `command` exports when it is typed in a shell that has only `environ`."""
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(word.split("=", 1) for word in shlex.split(done.stdout) if "=" in word)


@pytest.mark.parametrize("given", [
    {}, {"PRESET": "local"}, {"RECIPE": "deepcoder"}, {"RECIPE": "deepcoder", "PRESET": "local", "LORA": "0"},
    {"PRESET": "local", "ADAPTER_REPO": "me/a", "MAX_STEPS": "7", "LEARNING_RATE": "1e-5", "RATIO_STOP": "1",
     "LORA_TARGETS": "q_proj,v_proj", "ENGINE": "cpu", "CACHE_DIR": "/a cache/$HOME"},
    {"PRESET": "local", "ENGINE": "vllm"}, {"PRESET": "local", "ENGINE": "vllm", "DTYPE": "float32"},
    {"MODEL": str(REPO / "tiny/model"), "DTYPE": "float32", "SANDBOX": "local"}])
def test_the_command_leads_to_the_same_settings(given, script, tmp_path):
    empty = {"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": "/root"}
    environ = empty | {"RUN_DIR": str(tmp_path / "a run")} | given
    again = resume_command.command(script, environ)
    settings = Settings.load(environ).environ()
    assert {name: value for name, value in run(again, empty).items() if name in settings} == settings
    # the scripts export all settings, and what they start prints the same command
    assert resume_command.command(script, environ | settings) == again
    unchanged = {"RUN_DIR"} | {name for name, value in given.items() if name != "PRESET" and value != "cpu"}
    assert {word.split("=")[0] for word in shlex.split(again) if "=" in word} == unchanged, "and no other variable"


def test_no_secret_is_shown_and_no_run_is_refused_for_resume_never(script, tmp_path):
    environ = {"PATH": "/usr/bin:/bin", "HOME": "/root", "RUN_DIR": str(tmp_path), "CACHE_DIR": "/c", "RESUME": "never",
               "HF_TOKEN": "hf_hunter2", "CAPTURE_ADMIN_KEY": "hunter2", "DAYTONA_API_KEY": "hunter2",
               "TORCH_INDEX": "https://me:hunter2@index/cpu", "POLICY_URL": "http://me:hunter2@10.0.0.1:8001",
               "TRAINER_PYTHON": "/my/python", "ENV_PYTHON": "/c/envs/env-server-1/bin/python"}
    again = resume_command.command(script, environ)
    assert "hunter2" not in again and "RESUME=" not in again and "ENV_PYTHON" not in again, again
    got = run(again, {name: environ[name] for name in ("PATH", "HOME", "TORCH_INDEX", "POLICY_URL")})
    assert (got["TORCH_INDEX"], got["POLICY_URL"], got["TRAINER_PYTHON"]) == (
        environ["TORCH_INDEX"], environ["POLICY_URL"], "/my/python")
