"""One meaning for each exit code: what the scripts' help says, what they do, and the table agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from recipe import exits
from recipe.config import REPO

SHELL = sorted(path.name for path in REPO.glob("*.sh"))
PYTHON = ["train_lora.py", "prepare_tasks.py", "eval_adapter.py", "eval_watch.py", "export_adapter.py"]
MODULES = ["recipe.env_server", "recipe.policy_cpu", "recipe.opencode_binary"]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=REPO)


def documented(text: str) -> set[int]:
    """The codes in the paragraph that begins with "Exit codes"."""
    paragraph = re.search(r"^#? ?Exit codes.*?(?=^(?!#)|^#? *$|\Z)", text, re.M | re.S)
    assert paragraph, "no exit codes are documented"
    starts = r"(?:Exit codes:|;|·|,|/|^# +| {4})\s*(?:#\s*)?(\d{1,3})(?=[ /\n])"
    return {int(code) for code in re.findall(starts, paragraph.group(), re.M)}


@pytest.mark.parametrize("name", SHELL + PYTHON)
def test_documented_codes_are_in_the_table(name):
    text = (REPO / name).read_text()
    codes = documented(text)
    assert {exits.EXIT_USAGE} < codes <= set(exits.MEANING), codes


def test_the_job_documents_every_code_it_can_end_with():
    for name in ("run_job.sh", "run_eval.sh", "run_eval_watch.sh"):
        assert documented((REPO / name).read_text()) == set(exits.MEANING) - {1}, name
    allowed = re.search(r"^    ([\d| ]+)\) ;;$", (REPO / "recipe/job.sh").read_text(), re.M).group(1)
    assert {int(code) for code in allowed.split("|")} == set(exits.MEANING) - {1}


def test_shell_and_python_give_the_names_the_same_numbers():
    found = {}
    for file in (REPO / "recipe").glob("*.sh"):
        found |= dict(re.findall(r"^(EXIT_\w+)=(\d+)", file.read_text(), re.M))
    assert set(found) >= {"EXIT_USAGE", "EXIT_UNAVAILABLE", "EXIT_STALLED"}
    assert found == {name: str(getattr(exits, name)) for name in found}


def test_no_number_is_written_twice():
    """Other files import the names."""
    for file in (*REPO.glob("*.py"), *(REPO / "recipe").rglob("*.py")):
        if file.name != "exits.py":
            assert not re.search(r"^EXIT_\w+ *= *\d", file.read_text(), re.M), file


@pytest.mark.parametrize("arguments", [[name] for name in PYTHON] + [["-m", name] for name in MODULES])
def test_wrong_arguments_are_64_not_the_2_of_ungraded_cells(arguments):
    done = python(*arguments, "--nonsense")
    assert done.returncode == exits.EXIT_USAGE, done.stderr


def test_table_is_printed():
    table = python("-m", "recipe.exits").stdout
    assert table.strip() == exits.markdown_table()
    assert [int(line.split("|")[1]) for line in table.splitlines()[2:]] == [0, 1, 2, 64, 69, 75, 130, 143]


SCRIPTS = sorted(path.name for path in REPO.glob("*.py"))
NEEDY = {"eval_adapter.py": [], "eval_watch.py": ["--checkpoints", "."], "train_lora.py": [], "prepare_tasks.py": [],
         "export_adapter.py": ["--checkpoint", "me/a/checkpoint-1", "--local-dir", "out"], "report.py": ["me/a"]}


def bare(*arguments: str, **environ: str) -> list[subprocess.CompletedProcess[str]]:
    """The same command by the trainer's Python and the env server's, without any package (-S)."""
    return [subprocess.run([python, "-S", *arguments], capture_output=True, text=True, timeout=120, cwd=REPO,
                           env={"PATH": os.environ["PATH"]} | environ)
            for python in dict.fromkeys((sys.executable, os.environ.get("ENV_PYTHON", sys.executable)))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_no_package(name):
    for done in bare(name, "--help"):
        assert done.returncode == 0 and done.stderr == "" and "usage: " in done.stdout, done.stderr


@pytest.mark.parametrize("name", NEEDY)
def test_an_interpreter_without_the_packages_is_told_in_one_sentence(name, tmp_path):
    for done in bare(name, *NEEDY[name], RUN_DIR=str(tmp_path)):
        assert done.returncode == exits.EXIT_UNAVAILABLE, done.stderr
        assert re.fullmatch(r'python\S* has no \S+: run this in the trainer\'s environment,\n  eval "\$\(bash setup.sh '
                            rf'--local\)" && "\$TRAINER_PYTHON" {name}.*\n', done.stderr), done.stderr
