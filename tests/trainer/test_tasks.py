"""The tasks of both sources: solvable, unlike one another, pinned, and written whole or not at all."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import prepare_tasks
from recipe import hub_tasks, local_tasks
from recipe.config import REPO, SettingsError
from recipe.local_tasks import ANSWER_FILE, INPUT_DIR, KINDS, LocalTask, generate

N_KINDS = len(KINDS)


def grade(task: LocalTask, command: str, folder: Path) -> float:
    """Reward of running `command` as the agent would, with the sandbox's paths moved under `folder`."""
    places = {"/home/user/input": folder / "input", "/workdir": folder / "work", "/logs": folder / "logs",
              "/tests": folder / "tests"}

    def moved(text: str) -> str:
        for place, real in places.items():
            text = text.replace(place, str(real))
        return text

    shutil.rmtree(folder, ignore_errors=True)
    for place in places.values():
        place.mkdir(parents=True)
    for path, text in local_tasks.files(task).items():
        top, name = path.split("/")[0], path.rsplit("/", 1)[-1]
        if top == "tests":
            (places["/tests"] / name).write_text(moved(text))
        elif "/input/" in path:
            (places[INPUT_DIR] / name).write_text(text)
    subprocess.run(["bash", "-c", moved(command)], capture_output=True, timeout=240)
    env = {**os.environ, "EXPECTED_ANSWER": task.answer, "ATOL": "0.001", "RTOL": "0"}
    subprocess.run(["sh", str(folder / "tests/test.sh")], env=env, check=True, timeout=240)
    return float((folder / "logs/verifier/reward.txt").read_text())


@pytest.fixture(scope="module")
def held_out() -> list[LocalTask]:
    return generate("test", 64)


def test_generation_is_deterministic_and_follows_the_seed():
    assert generate("train", 64, 3) == generate("train", 64, 3)
    assert generate("train", 8, 3) == generate("train", 64, 3)[:8]
    assert not {t.instruction for t in generate("train", 64, 3)} & {t.instruction for t in generate("train", 64, 4)}


def test_splits_share_no_cell_no_file_and_no_instruction():
    splits = [generate(split, 128) for split in local_tasks.SPLITS]
    for take in (LocalTask.cells, lambda t: {t.file_name}, lambda t: {t.instruction}, lambda t: {t.csv}):
        seen = [set().union(*map(take, tasks)) for tasks in splits]
        assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    for tasks in splits:
        assert len({t.instruction for t in tasks}) == len(tasks)
        assert {t.kind.name for t in tasks} == set(KINDS)


def test_pipelines_fit_between_single_quotes():
    assert not any(set(task.pipeline) & set("'\"\\\n()") for task in generate("train", 64))


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_command_earns_one_and_the_wrong_ones_zero(kind, held_out, tmp_path):
    task = next(t for t in held_out if t.kind.name == kind)
    assert grade(task, f"{task.pipeline} > {ANSWER_FILE}", tmp_path / "a") == 1.0
    for wrong in (task.pipeline, f"{task.pipeline} > /workdir/result.txt", f": > {ANSWER_FILE}",
                  f"echo 1{task.answer} > {ANSWER_FILE}"):
        assert grade(task, wrong, tmp_path / "a") == 0.0


def test_the_grader_takes_the_same_number_in_another_form(held_out, tmp_path):
    task = next(t for t in held_out if t.kind.name == "second")
    assert grade(task, f"echo {int(task.answer):07,}.0 > {ANSWER_FILE}", tmp_path / "a") == 1.0
    assert grade(task, f"echo {int(task.answer) + 1} > {ANSWER_FILE}", tmp_path / "a") == 0.0


def test_no_memorised_command_solves_more_than_its_kind(held_out, tmp_path):
    """A command that finds the file by a wildcard solves its own kind at most; one with a file name, its own task."""
    rows = f"tail -n +2 {INPUT_DIR}/*.csv | wc -l > {ANSWER_FILE}"
    rewards = [grade(task, rows, tmp_path / "a") for task in held_out[:4 * N_KINDS]]
    assert 0 < sum(rewards) <= 4
    own = held_out[0]
    assert sum(grade(task, f"{own.pipeline} > {ANSWER_FILE}", tmp_path / "a") for task in held_out[:N_KINDS]) == 1
    answers = [task.answer for task in held_out]
    assert max(map(answers.count, answers)) <= len(answers) / N_KINDS


def test_local_tasks_are_written_once_and_repaired(tmp_path, monkeypatch, capsys):
    for variable in ("N_TRAIN_TASKS", "N_TASKS", "SEED"):
        monkeypatch.delenv(variable, raising=False)
    run = ["--local", "--out", str(tmp_path)]
    assert prepare_tasks.main(run) == 0
    order = json.loads((tmp_path / "test.json").read_text())["tasks"]
    assert len(order) >= 64 and sorted(order) == sorted(p.name for p in (tmp_path / "test").iterdir())
    (tmp_path / "test" / order[3] / "instruction.md").write_text("damaged")
    (tmp_path / "test" / order[4] / "tests/extra.txt").write_text("damaged")
    (tmp_path / "test/left_over").mkdir()
    (tmp_path / "test/left_over/task.toml").write_text("")
    capsys.readouterr()
    assert prepare_tasks.main(run) == 0
    assert "(2 new, 62 unchanged)" in capsys.readouterr().out
    assert not (tmp_path / "test/left_over").exists()


@pytest.mark.parametrize(("environ", "said"), [
    ({"N_TASKS": "100000"}, "100000 tasks are asked of the generator, which makes 3000 at most: lower N_TASKS."),
    ({"N_TRAIN_TASKS": "3001"}, "3001 tasks are asked of the generator, which makes 3000 at most: lower N_TRAIN_"),
    ({"N_TASKS": "100000", "RECIPE": "deepcoder"}, "makes 3000 problems of each split at most: lower N_TRAIN_TASKS")])
def test_more_tasks_than_can_be_made_are_refused_at_once(environ, said, tmp_path):
    environ = {"PATH": os.environ["PATH"], "N_TRAIN_TASKS": "1"} | environ
    done = subprocess.run([sys.executable, "prepare_tasks.py", "--local", "--out", str(tmp_path)], cwd=REPO, text=True,
                          capture_output=True, timeout=60, env=environ)
    assert done.returncode == 64 and said in done.stderr, done.stderr


def test_long_work_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(prepare_tasks, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    tasks = [prepare_tasks.made_here(f"t{i}", {"task.toml": ""}) for i in range(8)]
    assert prepare_tasks.materialize("train", tasks, tmp_path) == (8, 8)
    assert capsys.readouterr().out.splitlines() == ["[tasks] train: 3 of 8", "[tasks] train: 6 of 8"]


# -- tasks from the Hub: a stand-in for the download ---------------------------------------------------------------
TASK_TOML = """schema_version = "1.2"
[task]
name = "suite/a"
[environment]
cpus = 2
memory_mb = 4096
[environment.healthcheck]
command = "python3 /opt/pull_bucket.py"
[environment.env]
HF_BUCKET = "owner/bucket"
HF_TOKEN = "${HF_TOKEN}"
[verifier.env]
EXPECTED_ANSWER = "4"
HF_TOKEN = "${HF_TOKEN}"
"""


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """(list of two tasks, fetch) over a folder that stands for the dataset."""
    monkeypatch.setattr(hub_tasks, "GRADER_SHA256", hashlib.sha256(b"grader").hexdigest())
    tasks = []
    for name in ("a_qa_1", "b_qa_1"):
        for path in hub_tasks.FILES:
            file = tmp_path / "hub/tasks" / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            content = {"task.toml": TASK_TOML, "tests/grader.py": "grader", "instruction.md": f"Do {name}"}
            file.write_text(content.get(path, "x"))
        tasks.append(hub_tasks.PinnedTask(name, "hard", hashlib.sha256(f"Do {name}".encode()).hexdigest()))
    return hub_tasks.TaskList("owner/set", "0" * 40, tuple(tasks)), lambda path: tmp_path / "hub" / path


def test_hub_tasks_are_patched_and_kept_in_order(dataset, tmp_path):
    import tomllib

    pinned, fetch = dataset
    assert prepare_tasks.materialize("train", prepare_tasks.hub_source(pinned, 2, fetch), tmp_path) == (2, 2)
    assert prepare_tasks.materialize("train", prepare_tasks.hub_source(pinned, 2, fetch), tmp_path) == (2, 0)
    assert json.loads((tmp_path / "train.json").read_text())["tasks"] == ["a_qa_1", "b_qa_1"]
    doc = tomllib.loads((tmp_path / "train/a_qa_1/task.toml").read_text())
    assert doc["environment"]["docker_image"] == hub_tasks.DOCKER_IMAGE
    assert (doc["environment"]["cpus"], doc["environment"]["memory_mb"]) == (1, 4096)
    assert doc["environment"]["env"] == {"HF_BUCKET": "owner/bucket"}
    assert doc["verifier"]["env"] == {"EXPECTED_ANSWER": "4"}, "the verifier's command runs beside what the agent left"


@pytest.mark.parametrize("path", ["instruction.md", "tests/grader.py"])
def test_a_changed_file_stops_by_name_and_keeps_the_others(dataset, tmp_path, path):
    pinned, fetch = dataset
    fetch(f"tasks/b_qa_1/{path}").write_text("changed")
    with pytest.raises(hub_tasks.TaskError, match=f"b_qa_1: {path} has SHA-256"):
        prepare_tasks.materialize("train", prepare_tasks.hub_source(pinned, 2, fetch), tmp_path)
    assert [p.name for p in (tmp_path / "train").iterdir()] == ["a_qa_1"]


def test_an_unknown_layout_is_refused_and_too_many_tasks_too(dataset):
    inline = 'environment = {cpus = 2, env = {HF_TOKEN = "x"}}\n'
    with pytest.raises(ValueError, match="laid out"):
        hub_tasks.patch_task_toml(inline)
    with pytest.raises(SettingsError, match="N_TRAIN_TASKS"):
        prepare_tasks.hub_source(*dataset[:1], 3, dataset[1])


def test_the_pinned_lists_are_those_of_the_recipe():
    train, test = (hub_tasks.TaskList.read(REPO / "data" / f"{split}.json") for split in ("train", "test"))
    count = {split: [t.difficulty for t in tasks.tasks].count for split, tasks in (("train", train), ("test", test))}
    assert (count["train"]("medium"), count["train"]("hard")) == (400, 600)
    assert (count["test"]("easy"), count["test"]("medium"), count["test"]("hard")) == (33, 118, 99)
    notebooks = [{t.name.rsplit("_qa_", 1)[0] for t in tasks.tasks} for tasks in (train, test)]
    assert not notebooks[0] & notebooks[1]
    assert not {t.sha256 for t in train.tasks} & {t.sha256 for t in test.tasks}


def test_the_trainer_takes_the_tasks_in_the_order_of_the_list(tmp_path):
    """The server serves them sorted by name, which is not the recipe's order."""
    import dataclasses

    import train_lora
    from recipe.config import Settings

    pinned = hub_tasks.TaskList.read(REPO / "data/train.json").tasks[:50]
    names = [task.name for task in pinned]
    assert names != sorted(names)
    settings = dataclasses.replace(Settings.load({}), run_dir=str(tmp_path))

    class Server:
        def prompt_rows(self):
            return [{"prompt": [{"role": "user", "content": f"Question of {n}"}], "task": n} for n in sorted(names)]

    def order() -> list[str]:
        return [row["prompt"][0]["content"].split()[-1] for row in train_lora.task_dataset(settings, Server())]

    assert order() == sorted(names), "without a list the server's order counts"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/train.json").write_text(json.dumps({"split": "train", "tasks": names}))
    assert order() == names
    settings = dataclasses.replace(settings, seed=1)
    assert order() != names and sorted(order()) == sorted(names)
