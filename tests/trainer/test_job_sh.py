"""Supervision of recipe/job.sh with real processes: deaths, signals, stalls, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from loopback import job_ports
from marked import carrying

from recipe.config import REPO
from recipe.watchdog import session_members

PATIENCE = 240  # seconds: nothing takes them unless it waits for a `sleep 600`
PRELUDE = """
set -euo pipefail
REPO={repo}
cd "$REPO"
source recipe/job.sh
export PRESET=${{PRESET:-local}}
job_begin test_job.sh
"""
# A server that answers 200 everywhere, with a child that ignores SIGTERM: the hard case for a clean end.
SERVER = """python3 -c '
import http.server, signal, subprocess, sys
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn])
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
print("server starts", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()' "$POLICY_PORT"
"""
START = f"""step policy 'starting it'
start_process policy {SERVER.strip()}
wait_healthy policy $POLICY_PORT /health {PATIENCE}
"""


class Job:
    """A bash job in `run`; every process it starts carries a mark in its environment."""

    def __init__(self, run: Path, body: str, **env: str):
        self.run, self.mark = run, uuid.uuid4().hex
        script = run.parent / f"job-{self.mark}.sh"
        script.write_text(PRELUDE.format(repo=REPO) + body)
        inherited = {k: v for k, v in os.environ.items() if k not in ("ENV_PYTHON", "RUN_DIR", "PRESET")}
        self.process = subprocess.Popen(
            ["bash", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            # Tests in the background (`... &`) inherit an ignored SIGINT, and bash cannot trap what it got ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env=inherited | job_ports() | {"RUN_DIR": str(run), "JOB_MARK": self.mark, "STEP_GRACE": "2",
                                     "SERVER_GRACE": "2"} | env)

    def members(self) -> list[int]:
        return carrying(self.mark)

    def wait_for(self, pattern: str, file: str) -> re.Match[str]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            path = self.run / file
            match = re.search(pattern, path.read_text(), re.M) if path.exists() else None
            if match:
                return match
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} did not appear in {file}")

    def end(self) -> tuple[int, str]:
        """Exit code and output; asserts that no process is left."""
        output, _ = self.process.communicate(timeout=PATIENCE)
        assert self.members() == [], "processes were left behind"
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path):
    jobs: list[Job] = []

    def run(body: str, **env: str) -> Job:
        jobs.append(Job(tmp_path / "run", body, **env))
        return jobs[-1]

    yield run
    for job in jobs:
        for pid in job.members():
            os.kill(pid, signal.SIGKILL)
        job.process.wait()


def test_a_good_job_ends_with_0_and_leaves_nothing(start):
    job = start(START + "FOLLOW='^line' run_step work bash -c 'echo line 1; echo hidden; sleep 0.5; echo line 2'\n")
    code, output = job.end()
    assert code == 0, output
    assert "policy is healthy on port" in output
    assert re.search(r"^ +line 1\n +line 2$", output, re.M) and "hidden" not in output
    assert not (job.run / "processes").exists()
    assert "server starts" in (job.run / "logs" / "policy.log").read_text()


@pytest.mark.parametrize(("step", "job"), [(64, 64), (1, 69), (2, 69), (69, 69)])
def test_a_failed_step_gives_the_end_of_its_log_and_a_code_that_is_documented(start, step, job):
    code, output = start(START + f"run_step tasks bash -c 'echo old; echo the reason; exit {step}'\n").end()
    assert code == job
    assert f"failed with code {step}" in output
    again = "With the setting corrected, resume with" if step == 64 else "Resume with"
    assert "the reason" in output and "logs/tasks.log" in output and f"{again}: RUN_DIR=" in output
    assert "--local" in output


def test_where_the_list_of_processes_cannot_be_written_the_one_before_stays(start):
    job = start(START + """ln -s /dev/full "$RUN_DIR/.processes"
      start_process work sleep 600
      cat "$RUN_DIR/processes"; exit 69
    """)
    code, output = job.end()
    assert code == 69 and re.search(r"^\d+ policy$", output, re.M), output
    assert "No space left" in output and "WARN" in output and "processes cannot be written" in output


def test_a_job_that_cannot_write_its_own_log_ends_everything(start):
    job = start(START + """start_process work sleep 600
      exec >/dev/full 2>&1
      die 69 "nobody will read this"
    """)
    code, output = job.end()
    assert code == 69 and job.members() == [], output


PUSH = START + """run_step train bash -c '
trap "" TERM
(sleep 0.5; kill -TERM "$0"; echo "checkpoint-9 is not on the Hub" >"$RUN_DIR/pushing") &
until [[ -e $RUN_DIR/go ]]; do sleep 0.1; done
rm "$RUN_DIR/pushing"' "$$"
"""


@pytest.mark.parametrize("how", ["it ends", "time", "signal"])
def test_a_push_has_its_own_time_without_servers_and_is_named_when_that_is_too_short(start, how):
    job = start(PUSH, STEP_GRACE="60", PUSH_GRACE="1" if how == "time" else "300")
    said = []
    for line in job.process.stdout:
        said.append(line)
        if "s for the push or save that is under way" in line:
            (policy, name), *_ = (line.split() for line in (job.run / "processes").read_text().splitlines())
            assert name == "policy" and not session_members({int(policy)})
            if how == "it ends":
                (job.run / "go").touch()
            elif how == "signal":
                job.process.send_signal(signal.SIGINT)
    assert job.process.wait(PATIENCE) == 143 and job.members() == [], said
    assert ("checkpoint-9 is not on the Hub" in "".join(said)) == (how != "it ends"), said


def test_the_resume_command_fits_the_preset(start):
    code, output = start("run_step tasks false\n", PRESET="job", HF_TOKEN="hf_x", CACHE_DIR="").end()
    again = r"Resume with: RUN_DIR=\S+ (\w+_PORT=\d+ ){3}bash test_job.sh$"
    assert code == 69 and re.search(again, output, re.M), output
    code, output = start("run_step tasks bash -c 'echo \"again: $RESUME_WITH\"; false'\n", RECIPE="deepcoder",
                         MAX_STEPS="3", ENGINE="cpu", CACHE_DIR="").end()
    again = r"RUN_DIR=\S+ RECIPE=deepcoder MAX_STEPS=3 (\w+_PORT=\d+ ){3}bash test_job.sh --local$"
    assert re.search("Resume with: " + again, output, re.M), output
    assert re.search("again: " + again, output, re.M), "what the job starts prints the same one"


def test_a_job_that_was_started_elsewhere_is_resumed_from_anywhere(start, tmp_path):
    script = PRELUDE.format(repo=REPO).splitlines()
    elsewhere = subprocess.run(["bash", "-c", "cd /; " + "\n".join(script) + "\ndie 69 \"$RESUME_WITH\""], text=True,
                               capture_output=True, env=os.environ | job_ports() | {"RUN_DIR": str(tmp_path / "run")},
                               timeout=PATIENCE)
    assert elsewhere.stderr.rstrip().endswith(f"bash {REPO}/test_job.sh --local"), elsewhere.stderr


def test_a_script_that_evaluates_adapters_refuses_whole_models(start):
    code, output = start("require_lora\necho went on\n", RECIPE="deepcoder", PRESET="job").end()
    assert code == 64 and "set LORA=1" in output and "went on" not in output


@pytest.mark.parametrize(("gpus", "env", "policy", "trainer"), [
    (0, {}, "", ""),
    (1, {}, "", ""),
    (2, {}, "1", "0"),
    (2, {"POLICY_GPU": "0"}, "0", "1"),
    (4, {"POLICY_GPU": "0,1"}, "0,1", "2"),
    (2, {"POLICY_GPU": "0,1"}, "0,1", "0"),  # nothing is left for the trainer: shared
    (8, {"CUDA_VISIBLE_DEVICES": "5,3"}, "3", "5"),
    (8, {"CUDA_VISIBLE_DEVICES": "5,3", "POLICY_GPU": "5"}, "5", "3"),
    (1, {"GPUS": "1"}, "", ""),
    (2, {"GPUS": "1"}, "0", "0"),
    (2, {"GPUS": "1", "POLICY_GPU": "1"}, "1", "1"),
])
def test_gpus_of_policy_server_and_trainer(start, tmp_path, gpus, env, policy, trainer):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'\n" for i in range(gpus)))
    smi.chmod(0o755)
    given = {"CUDA_VISIBLE_DEVICES": "", "POLICY_GPU": "", "GPUS": "2"} | env
    code, output = start('assign_gpus\necho "policy=[$POLICY_GPU] trainer=[${TRAINER_ENV[*]}]"\n',
                         PATH=f"{smi.parent}:{os.environ['PATH']}", **given).end()
    assert code == 0, output
    assert f"policy=[{policy}] trainer=[{trainer and f'CUDA_VISIBLE_DEVICES={trainer}'}]" in output


@pytest.mark.parametrize("victim", ["policy", "work"])
def test_kill_9_of_a_process_ends_the_job_and_names_it(start, victim):
    job = start(START + "run_step work sleep 600\n")
    pid = int(job.wait_for(rf"^(\d+) {victim}$", "processes").group(1))
    job.wait_for(r"^\d+ work$", "processes")
    os.kill(pid, signal.SIGKILL)
    code, output = job.end()
    if victim == "policy":
        assert code == 69
        assert f"process 'policy' (pid {pid}) ended with code 137" in output and "logs/policy.log" in output
    else:
        assert code == 69 and "step 'work' was killed by SIGKILL" in output and "logs/work.log" in output


def test_a_server_that_dies_at_start_is_reported_at_once(start):
    code, output = start("step policy go\nstart_process policy bash -c 'echo no such model; exit 3'\n"
                         "wait_healthy policy $POLICY_PORT /health 600\n").end()
    assert code == 69
    assert "no such model" in output and "ended with code 3 during step policy" in output


def test_a_server_that_never_answers_is_given_up(start):
    code, output = start("start_process policy sleep 600\nwait_healthy policy $POLICY_PORT /health 1\n").end()
    assert code == 69 and "did not answer http://127.0.0.1:" in output


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_everything(start, number, code):
    job = start(START + "run_step work bash -c 'trap \"\" TERM; while :; do sleep 1; done'\n")
    job.wait_for(r"^\d+ work$", "processes")
    job.process.send_signal(number)
    got, output = job.end()
    assert got == code, output
    assert f"got {number.name} in step policy" in output and "Resume with: RUN_DIR=" in output


def test_a_stall_ends_the_job_with_75_and_the_watchdogs_message(start):
    job = start(START + "start_watchdog\nbeat train\nrun_step work sleep 600\n", STALL_LIMIT="5")
    code, output = job.end()
    assert code == 75, output
    assert "STALLED in phase train" in output and "limit of this phase is 5 s" in output


def test_a_second_job_in_the_same_folder_is_refused(start):
    first = start("run_step work sleep 600\n")
    first.wait_for(r"^\d+ work$", "processes")
    code, output = start("run_step work true\n").end()
    assert code == 69 and "another job works in" in output
    assert first.process.poll() is None
    first.process.terminate()
    assert first.end()[0] == 143


def test_a_busy_port_is_named_before_anything_starts(start):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, output = start("run_step work true\n", ENV_PORT=str(port)).end()
    assert code == 69
    assert f"port {port} (ENV_PORT) is in use" in output


def test_kill_9_of_the_job_itself_leaves_nothing(start):
    job = start(START + "start_watchdog\nrun_step work sleep 600\n")
    job.wait_for(r"^\d+ work$", "processes")
    job.wait_for("watching process", "logs/watchdog.log")
    os.kill(job.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while job.members() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert job.members() == []


def test_an_error_of_the_job_itself_ends_with_69_and_stops_everything(start):
    code, output = start(START + "cp /nonexistent /nowhere\n").end()
    assert code == 69 and "a command of the job itself failed with code 1" in output


def test_a_run_folder_that_cannot_be_made_is_a_wrong_setting(start, tmp_path):
    (tmp_path / "file").touch()
    code, output = start("run_step work true\n", RUN_DIR=str(tmp_path / "file" / "run")).end()
    assert code == 64 and "cannot make" in output and "set RUN_DIR" in output


@pytest.mark.parametrize("script", ["run_job.sh", "run_eval.sh", "run_eval_watch.sh"])
def test_help_and_unknown_arguments(script):
    shown = subprocess.run(["bash", REPO / script, "--help"], capture_output=True, text=True, timeout=PATIENCE)
    assert shown.returncode == 0 and "Exit codes" in shown.stdout and "set -euo" not in shown.stdout
    refused = subprocess.run(["bash", REPO / script, "--nonsense"], capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode == 64 and "--nonsense" in refused.stderr
