"""A training that is killed and started anew on an empty disk: it goes on from the Hub, exactly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_double import HubDouble
from training_process import TASKS, start, trained
from world import until

from recipe import checkpoints
from recipe.config import Settings

ADAPTER = "me/adapter"
STEPS = 6
RUN = {"ADAPTER_REPO": ADAPTER, "MAX_STEPS": str(STEPS)}


def shown_by_trackio(run: Path) -> int:
    """Steps whose reward Trackio's command line finds in the folder of a run."""
    done = subprocess.run([Path(sys.executable).with_name("trackio"), "get", "metric", "--project",
                           Settings().trackio_project, "--run", run.name, "--metric", "train/reward", "--json"],
                          env=os.environ | {"TRACKIO_DIR": str(run / "trackio")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return len(json.loads(done.stdout)["values"])


@pytest.mark.slow
def test_a_killed_job_goes_on_from_the_hub_with_the_next_tasks(hub: HubDouble, tmp_path):
    from lfm2_small import small_model
    from small_engine import SmallEngine

    with SmallEngine(small_model()) as engine:
        # While checkpoint-4 is being pushed: its files are on the Hub, its commit is not.
        hub.fail(1, lambda: os.killpg(first.pid, signal.SIGKILL), "/commit/", skip=1)
        first = start(tmp_path / "a", engine.url, **RUN)
        assert first.wait(600) == -signal.SIGKILL, (tmp_path / "a/out").read_text()[-3000:]
        messages = [c.message for c in hub.repo(ADAPTER).commits[1:]]
        assert messages == ["checkpoint-2"] and "PUT /lfs/" in hub.requests[-2]
        assert len(trained(tmp_path / "a", 0)) >= 4 and shown_by_trackio(tmp_path / "a") >= 2, "kill -9 lost steps"
        second = start(tmp_path / "b", engine.url, **RUN)
        assert second.wait(600) == 0, (tmp_path / "b/out").read_text()[-3000:]

    out = (tmp_path / "b/out").read_text()
    resumed = int(re.search(r"resuming from .*checkpoint-(\d+)", out)[1])
    assert resumed == int(messages[-1].split("-")[1])
    files = hub.repo(ADAPTER).files()
    position = json.loads(files[f"checkpoint-{resumed}/rollout_state.json"])["prompt_index"]
    before = {s: g for s, g in trained(tmp_path / "a", 0).items() if s <= resumed}
    after = trained(tmp_path / "b", position)
    assert sorted(before) + sorted(after) == list(range(1, STEPS + 1)), "every step once"
    groups = [*before.values(), *after.values()]
    assert len(set(groups)) == STEPS, f"a task was trained twice: {groups}"
    end = json.loads(files[f"checkpoint-{STEPS}/rollout_state.json"])["prompt_index"]
    ahead = json.loads(files[f"checkpoint-{STEPS}/task_cursor.json"])["trained_ahead"]
    assert set(groups) == set(range(end)) | {end + g for g in ahead}, "none that was only queued is left out"

    # the repository: whole checkpoints, the last adapter at the root, as the run folder has it
    assert {p.split("/")[0] for p in files if "/" in p} == {f"checkpoint-{s}" for s in (2, 4, 6)}
    adapter = (tmp_path / "b/adapter/adapter_model.safetensors").read_bytes()
    assert files["adapter_model.safetensors"] == adapter == files["checkpoint-6/adapter_model.safetensors"]
    assert checkpoints.newest_checkpoint(tmp_path / "b/checkpoints").name == "checkpoint-6"

    # a third start has nothing to train; other settings are refused by name
    third = start(tmp_path / "c", engine.url, **RUN)
    assert third.wait(600) == 0
    assert "checkpoint-6 has all 6 steps" in (tmp_path / "c/out").read_text()
    assert (tmp_path / "c/adapter/adapter_model.safetensors").read_bytes() == adapter
    other = start(tmp_path / "d", engine.url, **RUN, LORA_R="2")
    assert other.wait(600) == 64
    assert "LORA_R: " in (tmp_path / "d/out").read_text()


@pytest.mark.slow
def test_sigterm_waits_for_the_push_and_says_what_is_not_there_yet(hub: HubDouble, tmp_path):
    from lfm2_small import small_model
    from small_engine import SmallEngine

    run, outage = tmp_path / "a", hub.fail(10_000, 503, "/commit/", Retry_After="3")
    pushing = run / "pushing"
    with SmallEngine(small_model()) as engine:
        child = start(run, engine.url, fates={task: ["hangs"] for task in range(1, TASKS)}, **RUN)
        try:
            until(lambda: trained(run, 0) or child.poll() is not None, 600)
            child.send_signal(signal.SIGTERM)  # after step 1, of which there is no checkpoint
            until(lambda: pushing.exists() or child.poll() is not None, 600)
            told = pushing.read_text()
            assert f"hf upload {ADAPTER} {run}/checkpoints/checkpoint-1 checkpoint-1" in told and "It is kept" in told
            child.send_signal(signal.SIGTERM)  # a second one does not cut the push off
            outage.times = 0
            assert child.wait(600) == 143, (run / "out").read_text()[-3000:]
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    assert [c.message for c in hub.repo(ADAPTER).commits[1:]] == ["checkpoint-1"] and not pushing.exists()
    out = (run / "out").read_text()
    assert out.index("checkpoint-1 saved") < out.index("did not end within") < out.index(told.splitlines()[0])


@pytest.fixture
def look(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Exit code and text of `python -m recipe.resume` in a folder, with settings."""
    from recipe import resume

    def run(folder: str, **settings: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            for name, value in {"RUN_DIR": str(tmp_path / folder), "ADAPTER_REPO": ADAPTER, **settings}.items():
                patch.setenv(name, value)
            code = resume.main([])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def saved(folder: Path, step: int) -> Path:
    """A whole checkpoint in the run folder."""
    made = folder / f"checkpoints/checkpoint-{step}"
    made.mkdir(parents=True)
    (made / "adapter_model.safetensors").write_bytes(b"adapter %d" % step)
    return checkpoints.seal(made, Settings.load({}))


def test_what_a_job_would_begin_with_is_found_before_any_server(hub: HubDouble, look, tmp_path, monkeypatch):
    from recipe import hub as recipe_hub

    code, text = look("a")
    assert code == 0 and "the training begins at the base model" in text and f"{ADAPTER} can be written" in text
    for step in (100, 200):  # saved, but the machine went before they were pushed
        saved(tmp_path / "a", step)
    assert look("a")[0] == 0
    assert [c.message for c in hub.repo(ADAPTER).commits[1:]] == ["checkpoint-100", "checkpoint-200"]
    code, text = look("b")
    assert code == 0 and "goes on from checkpoint-200" in text
    code, text = look("b", MAX_STEPS="150")
    assert code == 0 and "goes on" not in text
    assert "checkpoint-200 has all 150 steps that MAX_STEPS asks for" in text and "set MAX_STEPS above 200" in text
    assert (tmp_path / "b/trained").read_text() == "150\n", "run_job.sh starts no policy server to train with"
    assert (tmp_path / "b/adapter/adapter_model.safetensors").read_bytes() == b"adapter 200"
    code, text = look("c", LORA_R="8")
    assert code == 64 and "LORA_R: 32 in the checkpoint, 8 now" in text
    code, text = look("c", RESUME="never")
    assert code == 64 and "choose another RUN_DIR or ADAPTER_REPO" in text
    hub.tokens["hf_read"] = "read"
    code, text = look("c", HF_TOKEN="hf_read")
    assert code == 64 and "HF_TOKEN may not write to me/adapter" in text and "Traceback" not in text
    monkeypatch.setattr(recipe_hub, "FIRST_WAIT", 0.01)
    hub.fail(10_000, "reset", "/api/")
    code, text = look("c")
    assert code == 69 and "still failing after" in text and "Traceback" not in text


def test_where_no_checkpoint_is_whole_nothing_begins_anew_unasked(hub: HubDouble, look, tmp_path):
    run = tmp_path / "run"
    first, second = saved(run, 100), saved(run, 200)
    (first / "adapter_model.safetensors").write_bytes(b"another")
    (second / "adapter_model.safetensors").unlink()
    files = sorted(run.rglob("*"))
    code, text = look("run", ADAPTER_REPO="", SEED="3")
    assert code == 64 and "begins at the base" not in text
    assert f"{first}: adapter_model.safetensors is not what its manifest says" in text
    assert f"{second}: adapter_model.safetensors is missing" in text
    assert text.rstrip().endswith(f"RESUME=never RUN_DIR={run} SEED=3 bash run_job.sh")
    code, text = look("run", ADAPTER_REPO="", RESUME="never")
    assert code == 0 and "begins at the base" in text and sorted(run.rglob("*")) == files

    saved(tmp_path / "other", 300)
    assert look("other")[0] == 0
    assert look("run")[0] == 0, "one in the repository is whole"
    broken = {"checkpoint-300/adapter_model.safetensors": b"damaged"}
    hub.repo(ADAPTER).add("damaged", broken)
    code, text = look("empty")
    assert code == 64 and f"checkpoint-300 in {ADAPTER}: adapter_model.safetensors has 7 bytes there" in text
    assert f"with another ADAPTER_REPO than {ADAPTER}, with:\n  RESUME=never " in text


def test_a_first_checkpoint_that_was_cut_off_stops_nothing(look, tmp_path):
    (saved(tmp_path / "run", 100) / checkpoints.MANIFEST).unlink()
    code, text = look("run", ADAPTER_REPO="")
    assert code == 0 and "checkpoint-100 is passed over" in text and "begins at the base" in text
    (saved(tmp_path / "run", 200) / checkpoints.MANIFEST).unlink()
    code, text = look("run", ADAPTER_REPO="")
    assert code == 64 and text.count("it was not written to its end") == 4, "two are no cut-off first one"
