"""Checkpoints to the Hub and back, with everything going wrong on the way that does in practice."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe import checkpoints
from recipe import hub as recipe_hub
from recipe.config import Settings
from recipe.hub import CheckpointPusher, HubError, fetch_newest

REPO = "me/adapter"
ADAPTER, STATE = b"adapter" * 3000, b"optimizer" * 3000


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(recipe_hub, "FIRST_WAIT", 0.01)


@pytest.fixture
def pusher(hub):
    pusher = CheckpointPusher(REPO)
    yield pusher
    pusher.abandon()


@pytest.fixture
def settings(tmp_path) -> Settings:
    return dataclasses.replace(Settings.load({}), run_dir=str(tmp_path))


def checkpoint(root: Path, step: int, settings: Settings, mark: bytes = b"") -> Path:
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    contents = {"adapter_model.safetensors": ADAPTER + mark, "adapter_config.json": b"{}", "optimizer.pt": STATE + mark,
                "trainer_state.json": json.dumps({"global_step": step}).encode(), "training_args.bin": b"pickle",
                "README.md": b"---", "rollout_state.json": b"{}"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return checkpoints.seal(folder, settings)


def test_one_commit_a_checkpoint_with_the_newest_adapter_at_the_root(hub, pusher, settings, tmp_path):
    assert pusher.open() == set() and hub.repo(REPO).private
    for step in (100, 200):
        pusher.push(checkpoint(tmp_path, step, settings, str(step).encode()))
    pusher.finish()
    repo = hub.repo(REPO)
    assert [c.message for c in repo.commits] == ["initial commit", "checkpoint-100", "checkpoint-200"]
    files = repo.files()
    assert files["adapter_model.safetensors"] == ADAPTER + b"200" == files["checkpoint-200/adapter_model.safetensors"]
    assert repo.commits[1].tree["adapter_model.safetensors"] == ADAPTER + b"100"
    manifest = json.loads(files["checkpoint-100/manifest.json"])
    assert manifest["step"] == 100
    assert set(manifest["files"]) == {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt",
                                      "trainer_state.json", "rollout_state.json", "settings.json"}
    assert {p.split("/")[1] for p in files if p.startswith("checkpoint-100/")} == {*manifest["files"], "manifest.json"}
    assert "optimizer.pt" not in files, "who wants the adapter does not download the optimizer"


@pytest.mark.parametrize("fault", [429, 500, 503, 412, "reset", "cut"])
def test_faults_that_pass_lose_nothing(hub, pusher, settings, tmp_path, fault):
    pusher.open()
    hub.fail(2, fault, "/commit/")
    hub.fail(1, fault if fault != 412 else 500, "PUT /lfs/")
    pusher.push(checkpoint(tmp_path, 100, settings))
    pusher.finish()
    assert hub.count("POST .*/commit/") == 3 and len(hub.repo(REPO).commits) == 2
    assert checkpoints.damage(fetch_newest(REPO, tmp_path / "back")) is None


def test_a_lasting_outage_ends_the_run_and_names_the_commands(hub, pusher, settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 2)
    pusher.open()
    outage = hub.fail(10_000, 503, "/commit/")
    for step in (100, 200):
        pusher.push(checkpoint(tmp_path, step, settings))
        pusher._wait()
    with pytest.raises(HubError) as error:
        pusher.check()
    for step in (100, 200):
        assert f"hf upload {REPO} {tmp_path}/checkpoint-{step} checkpoint-{step}" in str(error.value)
        assert checkpoints.damage(tmp_path / f"checkpoint-{step}") is None
    assert "attempt 1 of 2 failed" in capsys.readouterr().out
    outage.times = 0
    pusher.finish()  # the Hub is back before the end: what failed is pushed, oldest first
    assert [c.message for c in hub.repo(REPO).commits[1:]] == ["checkpoint-100", "checkpoint-200"]


def test_a_push_does_not_hold_the_step(hub, pusher, settings, tmp_path):
    pusher.open()
    with hub.lock:  # the Hub answers nothing
        pusher.push(checkpoint(tmp_path, 100, settings))
        pusher.check()
        assert pusher.running and len(hub.repo(REPO).commits) == 1
    pusher.finish()
    assert len(hub.repo(REPO).commits) == 2


@pytest.mark.parametrize("works", [True, False])
def test_a_training_that_fails_pushes_what_it_saved_and_fails_for_its_own_reason(hub, pusher, settings, tmp_path,
                                                                               monkeypatch, capsys, works):
    import train_lora

    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 1)
    pusher.open()
    if not works:
        hub.fail(10_000, 503, "/commit/")

    def train(resume_from_checkpoint):
        pusher.push(checkpoint(tmp_path, 100, settings))
        raise RuntimeError("the worker is gone")

    with pytest.raises(RuntimeError, match="the worker is gone"):
        train_lora.run_to_end(settings, SimpleNamespace(train=train), None, None, None, pusher)
    assert (len(hub.repo(REPO).commits) == 2) == works and (tmp_path / "pushing").exists() != works
    assert (f"hf upload {REPO} {tmp_path}/checkpoint-100" in capsys.readouterr().err) != works


def test_while_a_push_is_all_that_is_left_the_run_folder_says_what_is_not_there(hub, pusher, settings, tmp_path,
                                                                                monkeypatch):
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 1)
    pusher.open()
    said, command = tmp_path / "pushing", f"hf upload {REPO} {tmp_path}/checkpoint-100 checkpoint-100"
    with hub.lock:  # the Hub answers nothing
        pusher.push(checkpoint(tmp_path, 100, settings))
        assert "still on its way" in pusher.report() and command in pusher.report()
        with recipe_hub.pushing(tmp_path, pusher.report()):
            assert said.read_text() == pusher.report()
    assert not said.exists()
    hub.fail(10_000, 503, "/commit/")
    with pytest.raises(HubError), recipe_hub.pushing(tmp_path, ""):
        pusher.finish()
    assert "an outage" in said.read_text() and command in said.read_text()


def test_a_token_without_rights_is_refused_before_training_and_at_once_later(hub, settings, tmp_path, monkeypatch):
    hub.tokens["hf_read"] = "read"
    hub.repo(REPO)
    reader = CheckpointPusher(REPO)
    reader.api.token = "hf_read"
    with pytest.raises(HubError, match="may not write to me/adapter: give it write permission"):
        reader.open()
    reader.push(checkpoint(tmp_path, 100, settings))
    reader._wait()
    with pytest.raises(HubError, match="hf upload"):
        reader.check()
    assert hub.count("auth-check") == 1, "a refusal is not repeated"
    reader.abandon()
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    with pytest.raises(HubError, match="set a token of"):
        CheckpointPusher(REPO).open()


def test_an_older_checkpoint_that_comes_late_leaves_the_root_alone(hub, pusher, settings, tmp_path):
    pusher.open()
    for step in (200, 100):
        pusher.push(checkpoint(tmp_path, step, settings, str(step).encode()))
    pusher.finish()
    assert hub.repo(REPO).files()["adapter_model.safetensors"] == ADAPTER + b"200"


def test_the_newest_whole_checkpoint_is_fetched(hub, pusher, settings, tmp_path, capsys):
    assert fetch_newest(REPO, tmp_path / "back") is None, "no repository yet"
    pusher.open()
    assert fetch_newest(REPO, tmp_path / "back") is None, "nor a checkpoint"
    for step in (9, 100, 200, 300):
        pusher.push(checkpoint(tmp_path, step, settings))
    pusher.finish()
    repo = hub.repo(REPO)
    repo.add("a file is gone", {"checkpoint-300/optimizer.pt": None})
    repo.add("a file was changed", {"checkpoint-200/optimizer.pt": STATE[::-1]}, {"checkpoint-200/optimizer.pt"})
    repo.add("no manifest", {"checkpoint-400/optimizer.pt": STATE})
    back = fetch_newest(REPO, tmp_path / "back")
    assert back == tmp_path / "back/checkpoint-100" and checkpoints.newest_checkpoint(tmp_path / "back") == back
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["checkpoint-100"]
    out = capsys.readouterr().out
    assert "checkpoint-300 in me/adapter is passed over: optimizer.pt has 0 bytes" in out
    assert "checkpoint-200 in me/adapter is passed over: optimizer.pt is not what its manifest says" in out
    assert fetch_newest(REPO, tmp_path / "back", above=100) is None


def test_a_download_survives_faults_and_an_unreachable_hub_starts_nothing(hub, pusher, settings, tmp_path, monkeypatch):
    pusher.open()
    pusher.push(checkpoint(tmp_path, 100, settings))
    pusher.finish()
    for fault in (503, "reset"):
        hub.fail(1, fault, "GET .*optimizer.pt")
        hub.fail(1, fault, "GET /api/models/me/adapter$")
    assert checkpoints.damage(fetch_newest(REPO, tmp_path / "back")) is None
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 2)
    hub.fail(10_000, 503, "GET /api/")
    with pytest.raises(HubError, match="looking for checkpoints in me/adapter"):
        fetch_newest(REPO, tmp_path / "again")


@pytest.mark.parametrize(("fault", "says"), [
    (429, "limits this account's requests"), (500, "The Hub has an outage"), (503, "The Hub has an outage"),
    (412, "two runs must not share a repository"), ("reset", "reset"), ("cut", "")])
def test_a_fault_that_stays_has_its_message_and_the_command(hub, pusher, settings, tmp_path, monkeypatch, capsys,
                                                            fault, says):
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 2)
    pusher.open()
    hub.fail(10_000, fault, "/commit/")
    folder = checkpoint(tmp_path, 100, settings)
    pusher.push(folder)
    with pytest.raises(HubError) as error:
        pusher.finish()
    assert says in str(error.value) and f"hf upload {REPO} {folder} checkpoint-100" in str(error.value)
    assert "pushing checkpoint-100: attempt 1 of 2 failed, the next follows in" in capsys.readouterr().out
    assert checkpoints.damage(folder) is None and len(hub.repo(REPO).commits) == 1


def test_a_limit_of_requests_is_waited_for_as_long_as_the_hub_says(hub, pusher, settings, tmp_path, capsys):
    pusher.open()
    hub.fail(1, 429, "/commit/", Retry_After="1")
    pusher.push(checkpoint(tmp_path, 100, settings))
    pusher.finish()
    assert "the next follows in 1 s" in capsys.readouterr().out and len(hub.repo(REPO).commits) == 2


@pytest.mark.parametrize("there", [True, False])
def test_a_whole_checkpoint_is_not_written_again_while_it_may_be_pushed(settings, tmp_path, there):
    from recipe.group_trainer import GroupGRPOTrainer

    folder, saves = checkpoint(tmp_path, 100, settings), []
    if not there:
        (folder / "manifest.json").unlink()
    handler = SimpleNamespace(on_save=lambda *_: saves.append("told"))
    GroupGRPOTrainer.save_between_steps(SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path)), state=SimpleNamespace(global_step=100), model=None,
        control=None, callback_handler=handler, _save_checkpoint=lambda model, trial: saves.append("written")))
    assert saves == ([] if there else ["written", "told"])


@pytest.mark.parametrize(("asked", "waits"), [("300", 300), ("86400", 900), ("", 0.01), ("Wed, 21 Oct 2026", 0.01)])
def test_the_hub_is_obeyed_within_reason(asked, waits):
    class Clock(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)

    def limited():
        err = RuntimeError("limit")
        err.response = SimpleNamespace(status_code=429, headers={"Retry-After": asked})
        raise err

    waited: list[float] = []
    with pytest.raises(HubError):
        recipe_hub.repeat(limited, REPO, "asking", Clock(), attempts=2)
    assert waited == [waits]


# -- full disks ------------------------------------------------------------------------------------------------------
def test_a_download_that_fills_the_disk_loses_nothing(hub, pusher, settings, tmp_path, small_disk):
    pusher.open()
    folder = checkpoint(tmp_path, 100, settings)
    (folder / "optimizer.pt").write_bytes(b"x" * (small_disk.size - (200 << 10)))
    pusher.push(checkpoints.seal(folder, settings))
    pusher.finish()
    with small_disk.filled(), pytest.raises(HubError, match="The disk is full: free some of it") as error:
        fetch_newest(REPO, small_disk.folder)
    assert error.value.final and hub.count("GET .*optimizer.pt") == 1, "a full disk is not tried again"
    assert checkpoints.newest_checkpoint(small_disk.folder) is None
    assert checkpoints.damage(fetch_newest(REPO, small_disk.folder)) is None, "the same call goes on when there is room"


@pytest.mark.parametrize("writer", ["adapter", "optimizer", "manifest"])
def test_a_save_that_fills_the_disk_names_it_and_the_checkpoint_before_counts(
        settings, small_disk, monkeypatch, capsys, writer):
    import safetensors.torch
    import torch

    import train_lora

    run = small_disk.folder / "run"
    monkeypatch.setenv("RUN_DIR", str(run))

    def train(*_):
        checkpoint(run / "checkpoints", 100, settings)
        folder = run / "checkpoints/checkpoint-200"
        folder.mkdir()
        with small_disk.filled(0 if writer == "manifest" else 96 << 10):
            if writer == "adapter":
                safetensors.torch.save_file({"a": torch.zeros(1 << 20)}, folder / "adapter_model.safetensors")
            elif writer == "optimizer":
                torch.save({"a": torch.zeros(1 << 20)}, folder / "optimizer.pt")
            else:
                checkpoints.seal(folder, settings)
        raise AssertionError("the disk was not full")

    monkeypatch.setattr(train_lora, "train", train)
    with small_disk.kept_full():
        assert train_lora.main([]) == 69
    said = capsys.readouterr().err
    assert f"The disk of {run} is full" in said and f"RUN_DIR={run} bash run_job.sh" in said
    assert checkpoints.newest_checkpoint(run / "checkpoints").name == "checkpoint-100"
    assert "AssertionError" not in said


# -- local checkpoints -----------------------------------------------------------------------------------------------
def test_half_written_checkpoints_are_passed_over(settings, tmp_path):
    assert checkpoints.newest_checkpoint(tmp_path) is None
    for step in (9, 10, 100, 200):
        checkpoint(tmp_path, step, settings)
    (tmp_path / "checkpoint-200/manifest.json").unlink()
    (tmp_path / "checkpoint-100/optimizer.pt").write_bytes(STATE[:-1])
    assert checkpoints.newest_checkpoint(tmp_path).name == "checkpoint-10"
    (tmp_path / "checkpoint-10/manifest.json").write_text('{"step": 10, "fi')
    assert checkpoints.newest_checkpoint(tmp_path).name == "checkpoint-9"


def test_other_settings_are_refused_by_name(settings, tmp_path):
    folder = checkpoint(tmp_path, 9, settings)
    checkpoints.check_settings(folder, dataclasses.replace(settings, max_steps=5, policy_port=1, max_inflight=99,
                                                           sandbox_namespace="org"))
    other = dataclasses.replace(settings, lora_r=8, learning_rate=1e-4)
    with pytest.raises(checkpoints.CheckpointError, match="LORA_R: 32 in the checkpoint, 8 now") as error:
        checkpoints.check_settings(folder, other)
    assert "LEARNING_RATE: 1e-06 in the checkpoint, 0.0001 now" in str(error.value)
    assert str(error.value).count(" in the checkpoint") == 2 and "RESUME=never" in str(error.value)


def test_every_free_setting_exists():
    names = {field.name for field in dataclasses.fields(Settings)}
    assert names >= checkpoints.FREE
