"""prepare_tasks.py on synthetic datasets of the recipe's shape, served by the double."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hub_double import HubDouble, hub_environ

import prepare_tasks
from recipe import hub as recipe_hub
from recipe import hub_tasks
from recipe.config import REPO

TOML = """[metadata]
difficulty_tier = "{tier}"
[environment]
cpus = 2
memory_mb = 2048
[environment.env]
HF_TOKEN = "${{HF_TOKEN}}"
"""
SIZES = {"train": {"medium": 8, "hard": 12}, "test": {"easy": 2, "medium": 4, "hard": 4}}


@pytest.fixture
def data(hub: HubDouble, tmp_path, monkeypatch) -> Path:
    """The folder of the pinned lists; the double serves their datasets."""
    folder = tmp_path / "repository/data"
    folder.mkdir(parents=True)
    for split, tiers in SIZES.items():
        files, tasks = {}, []
        for tier in (tier for tier, count in tiers.items() for _ in range(count)):
            name = f"{split}{len(tasks):03d}_qa_1"
            text = f"Question of {name}".encode()
            tasks.append({"name": name, "difficulty": tier, "sha256": hashlib.sha256(text).hexdigest()})
            content = {"task.toml": TOML.format(tier=tier).encode(), "instruction.md": text,
                       "tests/grader.py": b"grader"}
            files |= {f"tasks/{name}/{path}": content.get(path, b"x") for path in hub_tasks.FILES}
            files[f"tasks/{name}/solution/big.bin"] = b"not needed"
        commit = hub.repo(f"owner/{split}", "dataset").add("tasks", files)
        (folder / f"{split}.json").write_text(json.dumps(
            {"dataset": f"owner/{split}", "revision": commit.sha, "tasks": tasks}))
    monkeypatch.setattr(prepare_tasks, "REPO", folder.parent)
    monkeypatch.setattr(hub_tasks, "GRADER_SHA256", hashlib.sha256(b"grader").hexdigest())
    monkeypatch.setattr(recipe_hub, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 3)
    for variable, value in {"PRESET": "job", "N_TRAIN_TASKS": "20", "N_TASKS": "10"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("SEED", raising=False)
    return folder


def names(out: Path, split: str) -> list[str]:
    return json.loads((out / f"{split}.json").read_text())["tasks"]


def test_all_tasks_in_the_recipes_order_and_only_the_needed_files(data, hub, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare_tasks.main(["--out", str(out)]) == 0
    assert names(out, "train") == [t["name"] for t in json.loads((data / "train.json").read_text())["tasks"]]
    assert hub.count("big.bin") == 0 and hub.count("GET .*/resolve/main/") == 0, "files needed, at the pinned commit"
    assert len(list((out / "test").iterdir())) == 10
    assert "HF_TOKEN" not in (out / "train/train000_qa_1/task.toml").read_text()
    hub.requests.clear()
    assert prepare_tasks.main(["--out", str(out)]) == 0
    assert "(0 new, 20 unchanged)" in capsys.readouterr().out
    assert hub.requests == [], "what is cached at a commit costs no request"


def test_a_subset_has_every_difficulty_in_its_share(data, hub, tmp_path, monkeypatch):
    chosen = {}
    for seed in ("0", "0", "1"):
        monkeypatch.setenv("SEED", seed)
        out = tmp_path / "out"
        assert prepare_tasks.main(["--out", str(out), "--subset", "5"]) == 0
        pinned = [t for s in SIZES for t in json.loads((data / f"{s}.json").read_text())["tasks"]]
        tiers = {t["name"]: t["difficulty"] for t in pinned}
        assert Counter(tiers[n] for n in names(out, "train")) == {"medium": 2, "hard": 3}
        assert Counter(tiers[n] for n in names(out, "test")) == {"easy": 1, "medium": 2, "hard": 2}
        assert names(out, "train") == sorted(names(out, "train")), "in the list's order"
        assert sorted(p.name for p in (out / "train").iterdir()) == names(out, "train"), "others are taken away"
        chosen.setdefault(seed, []).append((names(out, "train"), names(out, "test")))
    assert chosen["0"][0] == chosen["0"][1]
    assert chosen["1"][0][0] != chosen["0"][0][0], "SEED chooses the training tasks"
    assert chosen["1"][0][1] == chosen["0"][0][1], "but never the held-out ones"


@pytest.mark.parametrize(("path", "wanted"), [("instruction.md", "sha256"), ("tests/grader.py", "GRADER_SHA256")])
def test_a_changed_file_names_task_hashes_and_what_to_do(data, hub, tmp_path, capsys, path, wanted):
    train = json.loads((data / "train.json").read_text())
    changed = hub.repo("owner/train", "dataset").add("changed", {f"tasks/train003_qa_1/{path}": b"changed"})
    (data / "train.json").write_text(json.dumps(train | {"revision": changed.sha}))
    out = tmp_path / "out"
    assert prepare_tasks.main(["--out", str(out)]) == 69
    error = capsys.readouterr().err
    pinned = train["tasks"][3]["sha256"] if wanted == "sha256" else hub_tasks.GRADER_SHA256
    got = hashlib.sha256(b"changed").hexdigest()
    for text in (f"train003_qa_1: {path}", got, pinned, "run again", "continue with"):
        assert text in error, text
    assert not (out / "train.json").exists() and not (out / "train/train003_qa_1").exists()


@pytest.mark.parametrize(("what", "change"), [
    ("task train000_qa_1", lambda t: t | {"name": "train000_qa_1"}),
    ("notebook train000", lambda t: t | {"name": "train000_qa_7"}),
    ("instruction", lambda t: t | {"sha256": hashlib.sha256(b"Question of train000_qa_1").hexdigest()})])
def test_lists_that_overlap_are_refused_before_any_download(data, hub, tmp_path, capsys, what, change):
    test = json.loads((data / "test.json").read_text())
    test["tasks"][2] = change(test["tasks"][2])
    (data / "test.json").write_text(json.dumps(test))
    assert prepare_tasks.main(["--out", str(tmp_path / "out")]) == 69
    assert f"share the {what}" in capsys.readouterr().err and hub.requests == []


def test_an_outage_leaves_whole_tasks_and_the_same_command_goes_on(data, hub, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(prepare_tasks, "DOWNLOADS", 1)
    outage = hub.fail(10_000, 503, "train009_qa_1/instruction.md")
    assert prepare_tasks.main(["--out", str(out)]) == 69
    assert "downloading tasks/train009_qa_1/instruction.md: still failing after 3 attempts" in capsys.readouterr().err
    there = sorted(p.name for p in (out / "train").iterdir())
    assert there[:9] == [f"train{i:03d}_qa_1" for i in range(9)] and "train009_qa_1" not in there
    assert all((out / "train" / n / "tests/grader.py").is_file() for n in there) and not (out / "train.json").exists()
    outage.times = 0
    hub.fail(2, "reset", "train01[0-9]")  # passes by itself
    hub.requests.clear()
    assert prepare_tasks.main(["--out", str(out)]) == 0
    assert len(names(out, "train")) == 20 and hub.count("train00[0-8]") == 0
    assert sorted(p.name for p in out.iterdir()) == ["test", "test.json", "train", "train.json"]


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {repo!r})
import prepare_tasks
from recipe import hub_tasks
prepare_tasks.REPO, prepare_tasks.DOWNLOADS = Path({data!r}).parent, 2
hub_tasks.GRADER_SHA256 = {grader!r}
sys.exit(prepare_tasks.main(["--out", {out!r}]))
"""


def whole(folder: Path) -> bool:
    return all((folder / path).is_file() for path in hub_tasks.FILES)


def killed_at(hub: HubDouble, request: int, script: str, environ: dict[str, str]) -> None:
    """Runs the script until its request of this number has arrived."""
    hub.fail(1, lambda: child.kill(), "", skip=request)
    child = subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.DEVNULL)
    assert child.wait(300) == -signal.SIGKILL, "it ended before"


def test_kill_9_at_any_request_leaves_whole_tasks_and_the_same_command_goes_on(data, hub, tmp_path):
    out = tmp_path / "out"
    script = CHILD.format(repo=str(REPO), data=str(data), grader=hub_tasks.GRADER_SHA256, out=str(out))
    environ = os.environ | hub_environ(hub, tmp_path / "home")
    for more in (7, 23, 61):  # requests of each life; 30 tasks of 6 files are 180 at least
        killed_at(hub, more, script, environ)
        assert not [t for split in SIZES for t in (out / split).glob("*") if not whole(t)], "half a task"
        assert not (out / "test.json").exists()
    assert subprocess.run([sys.executable, "-c", script], env=environ, stdout=subprocess.DEVNULL).returncode == 0
    for split, tiers in SIZES.items():
        assert len(names(out, split)) == sum(tiers.values())
        assert all(whole(out / split / name) for name in names(out, split))
    assert sorted(p.name for p in out.iterdir()) == ["test", "test.json", "train", "train.json"]


def test_fewer_training_tasks_and_all_held_out_ones(data, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("N_TRAIN_TASKS", "5")
    out = tmp_path / "out"
    assert prepare_tasks.main(["--out", str(out)]) == 0
    assert len(names(out, "train")) == 5 and len(names(out, "test")) == 10
    assert hub.count("/resolve/.*/tasks/train") < hub.count("/resolve/.*/tasks/test"), "only those are downloaded"
    monkeypatch.setenv("N_TASKS", "4")
    assert prepare_tasks.main(["--out", str(out), "--split", "test"]) == 0
    assert len(names(out, "train")) == 5 and len(names(out, "test")) == 4 == len(list((out / "test").iterdir()))
    monkeypatch.setenv("N_TRAIN_TASKS", "21")
    assert prepare_tasks.main(["--out", str(out)]) == 64
    assert "21 tasks are asked of owner/train, the pinned list has 20: lower N_TRAIN_TASKS" in capsys.readouterr().err


def test_a_download_that_breaks_off_is_gone_on_with(data, hub, tmp_path):
    hub.fail(3, "truncated", "GET .*/instruction.md")
    assert prepare_tasks.main(["--out", str(tmp_path / "out")]) == 0
    assert not [fault for fault in hub.faults if fault.times], "the faults were met"


def test_a_full_disk_names_the_command(data, hub, small_disk, capsys):
    with small_disk.filled():
        assert prepare_tasks.main(["--out", str(small_disk.folder / "tasks")]) == 69
    said = capsys.readouterr().err
    assert "is full" in said and "continue with: python prepare_tasks.py" in said
    assert not (small_disk.folder / "tasks/train.json").exists()
    assert prepare_tasks.main(["--out", str(small_disk.folder / "tasks")]) == 0


def test_a_kill_while_a_task_is_written_leaves_nothing_half_written(data, hub, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(self, *_):
        raise Killed

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "chmod", killed)  # after the first file of each task
        prepare_tasks.main(["--out", str(out), "--split", "test"])
    assert list((out / "test").iterdir()) == [] and not (out / "test.json").exists()
    assert prepare_tasks.main(["--out", str(out), "--split", "test"]) == 0
    assert len(list((out / "test").glob("*/task.toml"))) == 10
