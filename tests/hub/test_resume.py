"""A training that is killed and started anew on an empty disk: it goes on from the Hub, exactly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_double import HubDouble
from slow_sessions import SlowSessions  # noqa: F401 (puts tests/trainer on the path)

from recipe import checkpoints
from recipe.config import REPO

ADAPTER = "me/adapter"
STEPS, TASKS = 6, 40

CHILD = """
    import os, sys
    from pathlib import Path
    sys.path[:0] = [{repo!r}, {repo!r} + "/tests/hub"]
    from slow_sessions import SlowSessions
    import train_lora

    if __name__ == "__main__":
        sessions = SlowSessions({engine!r}, tasks={tasks}, fates={{}}, log=Path({run!r}) / "sessions")
        real = train_lora.train
        train_lora.train = lambda settings, resume: real(settings, resume, sessions)
        sys.exit(train_lora.main([]))
"""


def start(folder: Path, engine: str, **settings: str) -> subprocess.Popen[str]:
    """train_lora.main in a process group of its own, with a new run folder."""
    from lfm2_small import local_settings

    folder.mkdir()
    base = local_settings(folder, save_steps=2, max_steps=STEPS, adapter_repo=ADAPTER, max_inflight=8)
    script = folder / "script.py"
    script.write_text(textwrap.dedent(CHILD.format(repo=str(REPO), engine=engine, tasks=TASKS, run=str(folder))))
    environ = {k: v for k, v in os.environ.items() if k != "TRACKIO_DIR"} | base.environ() | settings | {
        "POLICY_PORT": engine.rsplit(":", 1)[1], "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(script)], env=environ, start_new_session=True, text=True,
                            stdout=(folder / "out").open("w"), stderr=subprocess.STDOUT)


def kill_when(child: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """SIGKILL to the whole job once `ready`."""
    until = time.monotonic() + 600
    while not ready() and child.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert child.poll() is None, f"the training ended by itself with {child.returncode}"
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def trained(folder: Path, first_group: int) -> dict[int, int]:
    """Step -> number of the group in the run's order of tasks. A group's own number counts from the resumed one."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: first_group + line["group_rows"][0]["group"] for line in lines}


@pytest.mark.slow
def test_a_killed_job_goes_on_from_the_hub_with_the_next_tasks(hub: HubDouble, tmp_path):
    from lfm2_small import small_model
    from small_engine import SmallEngine

    with SmallEngine(small_model()) as engine:
        first = start(tmp_path / "a", engine.url)
        # While checkpoint-4 is being pushed: some of its files are on the Hub, its commit is not.

        def uploading() -> bool:
            seen = [r for r in hub.requests if "/commit/" in r or "PUT /lfs/" in r]
            return sum("/commit/" in r for r in seen) == 1 and "PUT /lfs/" in seen[-1]

        kill_when(first, uploading)
        messages = [c.message for c in hub.repo(ADAPTER).commits[1:]]
        assert messages in (["checkpoint-2"], ["checkpoint-2", "checkpoint-4"])
        second = start(tmp_path / "b", engine.url)
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
    third = start(tmp_path / "c", engine.url)
    assert third.wait(600) == 0
    assert "checkpoint-6 has all 6 steps" in (tmp_path / "c/out").read_text()
    assert (tmp_path / "c/adapter/adapter_model.safetensors").read_bytes() == adapter
    other = start(tmp_path / "d", engine.url, LORA_R="2")
    assert other.wait(600) == 64
    assert "LORA_R: " in (tmp_path / "d/out").read_text()
