"""Heartbeat and watchdog, with real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from recipe import watchdog
from recipe.config import REPO, Settings

PATIENCE = 240  # seconds: nothing takes them unless it waits for a sleep of 600


def settings(**env: str) -> Settings:
    return Settings.load({"PRESET": "local"} | env)


def test_beat_and_read(tmp_path):
    path = tmp_path / "new" / "heartbeat.json"
    assert watchdog.read(path) is None
    watchdog.beat(path, "train", step=3)
    record = watchdog.read(path)
    assert (record["phase"], record["step"], record["pid"]) == ("train", 3, os.getpid())
    assert abs(record["time"] - time.time()) < 60
    assert [p.name for p in path.parent.iterdir()] == ["heartbeat.json"], "no temporary file stays"


def test_a_reader_never_sees_half_a_beat(tmp_path):
    path = tmp_path / "heartbeat.json"
    watchdog.beat(path, "train", step=0)
    stop = threading.Event()

    def write(filler: str) -> None:
        while not stop.is_set():
            watchdog.beat(path, "train", filler=filler * 2000)

    writers = [threading.Thread(target=write, args=(c,)) for c in "ab"]
    for w in writers:
        w.start()
    try:
        for _ in range(2000):
            assert len(set(watchdog.read(path).get("filler", "a"))) == 1
    finally:
        stop.set()
        for w in writers:
            w.join()


def test_limits_by_phase():
    s = settings(STALL_LIMIT="100")
    now = 10_000.0
    assert watchdog.limit_of("train", s) == watchdog.limit_of("eval", s) == 100
    assert watchdog.limit_of("policy", s) > 100 and watchdog.limit_of("unheard of", s) == watchdog.DEFAULT_LIMIT
    assert watchdog.overdue({"phase": "train", "time": now - 99}, s, now) is None
    assert watchdog.overdue({"phase": "train", "time": now - 101}, s, now) == 101
    assert watchdog.overdue({"phase": "policy", "time": now - 101}, s, now) is None


def test_message_names_phase_time_and_resume_command():
    text = watchdog.stall_message({"phase": "train", "time": 0, "pid": 1, "step": 7}, 130.4,
                                  settings(STALL_LIMIT="100"), "RUN_DIR=/r bash run_job.sh")
    assert all(part in text for part in ("phase train", "130 s", "limit of this phase is 100 s", "step=7",
                                         "RUN_DIR=/r bash run_job.sh"))


@pytest.fixture
def job():
    """A process of its own that stands for run_job.sh's main process."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def watch(run_dir, pid: int, **env: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "recipe.watchdog", "--run-dir", run_dir, "--pid", str(pid), "--poll", "0.1",
               "--resume", "bash run_job.sh"]
    guard = subprocess.Popen(command, cwd=REPO, env=os.environ | {"PRESET": "local"} | env, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert guard.stdout.readline().startswith(f"watching process {pid}")  # beats from here on are this run's
    return guard


def test_a_stall_terminates_the_job(tmp_path, job):
    guard = watch(tmp_path, job.pid, STALL_LIMIT="5")
    watchdog.beat(tmp_path / "heartbeat.json", "train", step=12)
    _, errors = guard.communicate(timeout=PATIENCE)
    assert guard.returncode == watchdog.EXIT_STALLED
    assert job.wait(timeout=PATIENCE) == -signal.SIGTERM
    assert "phase train" in errors and "step=12" in errors
    stalled = json.loads((tmp_path / "stalled.json").read_text())
    assert stalled["silent"] > 5 and "bash run_job.sh" in stalled["message"]


def test_beats_keep_the_job_and_its_end_ends_the_guard(tmp_path, job):
    old = {"phase": "train", "time": time.time() - 3600, "pid": 1}  # of the run that this one resumes: no stall
    (tmp_path / "heartbeat.json").write_text(json.dumps(old))
    guard = watch(tmp_path, job.pid, STALL_LIMIT="5")
    time.sleep(0.5)
    assert guard.poll() is None
    for step in range(12):  # 6 s of beats, more than the limit
        watchdog.beat(tmp_path / "heartbeat.json", "train", step=step)
        time.sleep(0.5)
    assert guard.poll() is None and job.poll() is None
    job.kill()
    job.wait()
    guard.communicate(timeout=PATIENCE)
    assert guard.returncode == 0 and not (tmp_path / "stalled.json").exists()


def test_a_killed_job_leaves_no_listed_session(tmp_path, job):
    sleep = "import time; time.sleep(600)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
    server = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while len(watchdog.session_members({server.pid})) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        (tmp_path / "processes").write_text(f"{server.pid} policy\n")
        watchdog.beat(tmp_path / "heartbeat.json", "train")
        guard = watch(tmp_path, job.pid)
        time.sleep(0.5)
        job.kill()
        job.wait()
        _, errors = guard.communicate(timeout=PATIENCE)
        assert "policy" in errors
        server.wait(timeout=PATIENCE)
        assert watchdog.session_members({server.pid}) == []
    finally:
        for pid, _ in watchdog.session_members({server.pid}):
            os.kill(pid, signal.SIGKILL)
        server.wait()
