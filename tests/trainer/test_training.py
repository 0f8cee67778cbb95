"""train_lora.py end to end in one process, against a small engine: steps, weights, metrics, resume, a dying worker."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lfm2_small import local_settings, small_model
from peft import PeftModel
from safetensors.torch import load_file
from small_engine import TURN, SmallEngine, SmallSessions
from transformers import Lfm2ForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

import export_adapter
import train_lora
from recipe import json_lines, pristine, rollout_log, rollout_worker, speed
from recipe.checkpoints import newest_checkpoint
from recipe.config import Settings
from recipe.rollout_worker import RolloutLoop
from recipe.weight_sync import merged_parameters

REPO = Path(__file__).parents[2]
RATIO = ("ratio_mean", "ratio_min", "ratio_max", "clipped")
# Group 0 forks and has an ungraded rollout, group 1 cannot run at all. Group 2 is started before group 0 is trained
# and calls the model after that (the start weights are the first sync). Two rollouts of group 3 span the third sync.
FATES = {0: ["forks", "runs", "ungraded", "runs"], 1: ["fails"], 2: ["boots 2"], 3: ["runs", "spans 3"]}


def steps_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trackio_steps(run: Path, project: str) -> dict[int, int]:
    """Trackio's x axis -> the optimizer step whose reward was logged there."""
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs(project, run.name)
    return {log["step"]: log["train/global_step"] for log in logs if "train/reward" in log}


def test_arguments_exist_in_trl(tmp_path):
    settings = local_settings(tmp_path)
    assert set(train_lora.trainer_arguments(settings, gpu=False)) <= {f.name for f in
                                                                      dataclasses.fields(AsyncGRPOConfig)}
    arguments = train_lora.worker_arguments(settings, None, None, None, [7])
    known = set()
    for cls in (*RolloutLoop.__mro__, AsyncRolloutWorker):
        known |= set(inspect.signature(cls.__init__).parameters)
    assert set(arguments) <= known
    assert arguments["max_tool_calling_iterations"] == settings.max_model_calls
    assert arguments["max_inflight_tasks"] == settings.max_inflight


def test_job_arguments_are_the_recipes(tmp_path):
    job = dataclasses.replace(Settings.load({}), run_dir=str(tmp_path))
    arguments = train_lora.trainer_arguments(job, gpu=True)
    expected = dict(learning_rate=1e-6, lr_scheduler_type="constant", max_steps=1000, num_generations=8,
                    max_staleness=4, save_steps=100, temperature=1.0, top_p=1.0, top_k=0, max_inflight_tasks=32,
                    max_completion_length=4096, max_tool_calling_iterations=32, dtype="bfloat16", bf16=True,
                    gradient_checkpointing=True)
    assert {name: arguments[name] for name in expected} == expected


def test_training_then_resume(tmp_path, monkeypatch, capsys, trl_globals):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO / "tests/trainer"), os.environ.get("PYTHONPATH", "")]))
    settings = local_settings(tmp_path, save_steps=2)
    base = small_model()
    with SmallEngine(base, hold={3: (3, 4)}) as engine:  # group 3 begins before the step on group 2
        settings = dataclasses.replace(settings, policy_port=engine.server.server_port)
        sessions = SmallSessions(engine.url, tasks=4, fates=FATES, log=tmp_path / "sessions")
        assert train_lora.train(settings, "auto", sessions) == 0
        first = steps_of(tmp_path)
        served = engine.served
        resumed = dataclasses.replace(settings, max_steps=4)
        (tmp_path / "sessions").unlink()
        assert train_lora.train(resumed, "auto", sessions) == 0

    # one step is one group; group 1 was skipped and counted
    assert [s["step"] for s in first] == [1, 2, 3]
    groups = [{row["group"] for row in s["group_rows"]} for s in first]
    assert groups == [{0}, {2}, {3}]
    assert first[0]["rollouts"] == 3 and first[0]["rows"] == 4, "an ungraded rollout leaves, a fork adds a row"
    assert first[0]["forks"] == 1 and first[0]["drift_tokens"] > 0 and first[0]["realigned"] == 0
    assert first[1]["rollouts"] == first[1]["rows"] == 4
    assert first[1]["skipped_groups"] == {"stale": 0, "ungraded": 1, "no contrast": 0}
    assert first[1]["trained_tokens"] == 4 * 2 * TURN and first[1]["tool_calls"] == 2
    for step in first:
        assert step["reward_mean"] == pytest.approx(sum(step["rewards"]) / step["rollouts"])

    # every rollout is on record with its reward or without, and leads from a step to its trials
    rollouts = json_lines.read(tmp_path / rollout_log.FILE)
    of_steps = [rollout_log.of_step(rollouts, next(iter(g)), s["time"]) for g, s in zip(groups, first, strict=True)]
    assert [len({r["trial"] for r in of_step}) for of_step in of_steps] == [4, 4, 4]
    for step, of_step in zip(first, of_steps, strict=True):
        assert sorted(step["rewards"]) == pytest.approx(sorted(r["reward"] for r in of_step if r["reward"] is not None))
    assert [r["reason"] for r in of_steps[0] if r["reward"] is None] == ["ungraded"]
    failed = [r["reward"] for r in rollouts if r["reason"] == "fails"]
    assert len(failed) >= 4 and set(failed) == {None}
    again = steps_of(tmp_path)[3]
    of_resumed = rollout_log.of_step(rollouts, again["group_rows"][0]["group"], again["time"])
    assert len(of_resumed) == 4
    assert of_resumed[0]["worker"] > rollouts[0]["worker"], "the number of its group was used before"

    # rows that one version sampled have ratio 1: the engine held what the trainer trains
    fresh = [row for s in first for row in s["group_rows"] if row["fresh"]]
    assert fresh and all(abs(row["ratio"] - 1) < 1e-4 for row in fresh), [row["ratio"] for row in fresh]
    assert first[0]["fresh_rows"] == 4 and first[0]["staleness_max"] == 0
    # ... also when they were started under older weights: what counts is when the model was called
    assert first[1]["fresh_rows"] == 4 and first[1]["staleness_max"] == 0
    for step, age in ((first[0], 0), (first[2], 1)):  # also on the dashboard, by age
        dashboard = {name: step["trl"][f"health/{name}_stale_{age}"] for name in RATIO}
        assert dashboard == pytest.approx({name: step["by_staleness"][str(age)][name] for name in RATIO})
    assert first[2]["fresh_rows"] == 0 and [row["staleness"] for row in first[2]["group_rows"]] == [1] * 4

    # the engine got the start weights and one sync a step, each base + scaling * B @ A
    assert len(served) >= 4 and engine.received == len(engine.served)
    original = base.state_dict()
    assert all(torch.equal(served[0][name], original[name]) for name in served[0])
    assert any(not torch.equal(served[3][name], original[name]) for name in served[3])
    adapter = train_lora_adapter(tmp_path)
    merged = dict(merged_parameters(adapter))
    assert all(torch.equal(merged[name], engine.served[-1][name]) for name in merged), "last sync is the saved adapter"

    # what is exported scores a text as the engine did after the trainer's last sync
    assert export_adapter.main(["--checkpoint", str(tmp_path / "adapter"), "--local-dir", str(tmp_path / "out")]) == 0
    exported = PeftModel.from_pretrained(Lfm2ForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "out").eval()
    ids = [1, 6, 8, 9, 12, 7, 10, 6, 9]
    answer = engine.score(ids)["choices"][0]["prompt_logprobs"][1:]
    trained = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], answer, strict=True)]
    assert pristine.logprobs(exported, ids) == pytest.approx(trained, abs=1e-5)
    assert pristine.distance(pristine.logprobs(base, ids), trained) > 1e-3

    assert trackio_steps(tmp_path, settings.trackio_project) == {step: step for step in (1, 2, 3, 4)}

    # resume: from the last whole checkpoint (step 3, the final one), with the tasks that follow
    out = capsys.readouterr().out
    assert "starting from the base model" in out and "resuming from" in out
    assert [s["step"] for s in steps_of(tmp_path)[3:]] == [4]
    assert "LoRA on" in out and "step 3/3 | reward" in out and "Rows sampled wholly under the trained weights" in out
    (tmp_path / "trained").unlink()  # a checkpoint of the last step says it again
    assert train_lora.train(resumed, "auto") == 0 and (tmp_path / "trained").read_text() == "4\n"
    assert json.loads((tmp_path / "heartbeat.json").read_text())["phase"] == "save"
    assert not (tmp_path / "weights").exists()


def test_a_group_without_contrast_is_a_step_that_moves_nothing_where_it_is_held(tmp_path, monkeypatch, trl_globals):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO / "tests/trainer"), os.environ.get("PYTHONPATH", "")]))
    settings = local_settings(tmp_path, zero_contrast="hold")
    with SmallEngine(small_model()) as engine:
        settings = dataclasses.replace(settings, policy_port=engine.server.server_port)
        sessions = SmallSessions(engine.url, 3, {1: ["runs", "ungraded"]}, tmp_path / "sessions", in_order=True)
        assert train_lora.train(settings, "never", sessions) == 0
    assert [(step["contrast"], step["rollouts"]) for step in steps_of(tmp_path)] == [(True, 4), (False, 2), (True, 4)]
    moved = [any(not torch.equal(before[name], after[name]) for name in after)
             for before, after in zip(engine.served[:-1], engine.served[1:], strict=True)]
    assert moved == [True, False, True], "AdamW's momentum stands still too"


def train_lora_adapter(run: Path):
    return PeftModel.from_pretrained(Lfm2ForCausalLM.from_pretrained(run / "model"), run / "adapter")


CHILD_KILLED = """
    import dataclasses, os, signal, sys, threading, time
    from pathlib import Path
    sys.path[:0] = [{repo!r}, {tests!r}]
    import train_lora
    from lfm2_small import local_settings, small_model
    from small_engine import SmallEngine, SmallSessions

    def kill(log, signum, target):
        trackio = run / "trackio"  # rollouts may be served before the trainer has opened its log
        metrics, steps = run / "metrics.jsonl", {steps}
        while not (log.exists() and log.read_text() and trackio.exists() and any(trackio.iterdir())
                   and (not steps or metrics.exists() and len(metrics.read_text().splitlines()) >= steps)):
            time.sleep(0.1)
        from recipe import rollout_worker  # not before: trackio would be imported without its folder
        rollout_worker.GRACE = 3600.0  # the trainer is to notice by itself, however slow the machine is
        os.kill(target or int(log.read_text().split()[0]), signum)

    if __name__ == "__main__":
        run = Path({run!r})
        settings = local_settings(run, max_steps=10_000, save_steps=0)
        with SmallEngine(small_model()) as engine:
            os.environ.update(settings.environ(), POLICY_PORT=str(engine.server.server_port))
            sessions = SmallSessions(engine.url, tasks=3, fates={{}}, log=run / "sessions")
            arguments = (run / "sessions", signal.{signal}, {target})
            threading.Thread(target=kill, args=arguments, daemon=True).start()
            real = train_lora.train
            train_lora.train = lambda s, resume: real(s, resume, sessions)
            code = train_lora.main([])
        sys.exit(code)
"""


def run_and_signal(tmp_path: Path, signal: str, target: str, steps: int = 0) -> subprocess.CompletedProcess:
    """train_lora.main in a process of its own; `signal` hits `target` once rollouts run and `steps` are trained."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(CHILD_KILLED.format(
        repo=str(REPO), tests=str(REPO / "tests/trainer"), run=str(tmp_path), signal=signal, target=target,
        steps=steps)))
    environ = {name: value for name, value in os.environ.items() if name != "TRACKIO_DIR"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, env=environ)
    assert any((tmp_path / "trackio").iterdir()), "trackio writes into the run folder"
    return done


def test_training_in_bfloat16_reads_adapters_plainly_and_compiles_layers(tmp_path, monkeypatch, capsys, trl_globals):
    """As on a GPU, here with the compiler's quick backend: canary and start-up check run under the same autocast."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO / "tests/trainer"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(speed.compile_layers, "__defaults__", ("aot_eager",))
    settings = dataclasses.replace(local_settings(tmp_path, save_steps=0), dtype="bfloat16", compile="on", max_steps=2)
    save, came = train_lora.save, []
    former = signal.signal(signal.SIGTERM, lambda *_: came.append("it would have ended the process"))

    def save_meanwhile(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        assert not (tmp_path / "trained").exists(), "not before the adapter is whole"
        assert "final adapter was not saved whole" in (tmp_path / "pushing").read_text(), "the job waits for it"
        return save(*args)

    monkeypatch.setattr(train_lora, "save", save_meanwhile)
    with SmallEngine(small_model()) as engine:
        settings = dataclasses.replace(settings, policy_port=engine.server.server_port)
        try:
            assert train_lora.train(settings, "never", SmallSessions(engine.url, 4, {}, tmp_path / "sessions")) == 0
        finally:
            signal.signal(signal.SIGTERM, former)
    assert not came and not (tmp_path / "pushing").exists()
    assert (tmp_path / "trained").read_text() == "2\n", "all steps are trained: a SIGTERM loses none"
    assert "layers that are compiled: 4" in capsys.readouterr().out
    steps = steps_of(tmp_path)
    assert len(steps) == 2 and all(s["trl"]["sync/canary_gap"] < 0.15 for s in steps)
    assert all(abs(row["ratio"] - 1) < 0.05 for s in steps for row in s["group_rows"] if row["fresh"])


def test_killed_worker_ends_the_trainer_at_once(tmp_path):
    done = run_and_signal(tmp_path, "SIGKILL", "0", steps=2)
    assert done.returncode == 69, done.stderr[-3000:]
    assert "The rollout worker (pid " in done.stderr and "was killed by signal 9" in done.stderr
    assert "Resume with:" in done.stderr
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest and newest.name == f"checkpoint-{len(steps_of(tmp_path))}", "no step is lost"


@pytest.mark.parametrize("noticed", [False, True])
def test_a_trainer_that_saves_after_its_workers_death_has_the_time(monkeypatch, noticed):
    for name in ("GRACE", "STOP_GRACE"):
        monkeypatch.setattr(rollout_worker, name, 0.05)
    ends: list[int] = []
    monkeypatch.setattr(rollout_worker.os, "_exit", ends.append)
    sentinel, other_end = os.pipe()
    os.close(other_end)
    dead = SimpleNamespace(sentinel=sentinel, is_alive=lambda: False, exitcode=-9, pid=7)
    worker = rollout_worker.RolloutWorker.__new__(rollout_worker.RolloutWorker)
    worker._process, worker._failed_event, worker._stopped = dead, threading.Event(), threading.Event()
    worker.ending = False
    if noticed:
        with pytest.raises(rollout_worker.WorkerDied, match="was killed by signal 9"):
            worker.check_health(300)
    worker._watch(dead)
    os.close(sentinel)
    assert ends == ([] if noticed else [69])


def test_sigterm_saves_a_checkpoint(tmp_path):
    done = run_and_signal(tmp_path, "SIGTERM", "os.getpid()")
    assert done.returncode == 143, done.stderr[-3000:]
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert "The same command goes on from there" in done.stdout
    assert load_file(newest / "adapter_model.safetensors")
