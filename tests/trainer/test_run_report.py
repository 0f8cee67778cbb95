"""report.py on run folders: what it shows, what it hides, and what a damaged run still gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Browser
from PIL import Image

import report as report_command
from recipe import redact, report, run_report
from recipe.config import REPO

SESSION_KEY = "s0123456789abcdef01234567"
SECRETS = {"token": "hf_" + "aB3" * 11, "session": SESSION_KEY, "other session": "sfedcba9876543210fedcba98",
           "environment": "very-private-value-17", "bearer": "Zm9vYmFyYmF6cXV4", "assigned": "Tr0ub4dor-and-3"}
HOSTILE = '<script>window.pwned=1</script><img src=x onerror="window.pwned=1"></pre></details>\x1b[31m\x00\u202e'


def event(kind: str, **part) -> str:
    return json.dumps({"type": kind, "timestamp": 1, "sessionID": "ses_1", "part": part}) + "\n"


def tool(command: str, output: str) -> str:
    return event("tool_use", type="tool", tool="bash", callID="c1",
                 state={"status": "completed", "input": {"command": command}, "output": output})


def write_trial(run: Path, name: str, events: str, key: str = SESSION_KEY, reward: float = 1.0) -> Path:
    trial = run / "trials" / name
    (trial / "agent").mkdir(parents=True)
    (trial / "verifier").mkdir()
    (trial / "agent/opencode.txt").write_text(events)
    steps = [{"step_id": 1, "source": "user", "message": f"The question of {name}"}]
    (trial / "agent/trajectory.json").write_text(json.dumps({"schema_version": "ATIF-v1.7", "steps": steps}))
    (trial / "verifier/reward.txt").write_text(str(reward))
    (trial / "result.json").write_text(json.dumps({"exception_info": None}))
    provider = {"options": {"apiKey": key, "headers": {"x-api-key": key}}}
    (trial / "config.json").write_text(json.dumps({"agent": {"kwargs": {"opencode_config": {"provider": {
        "intercepted": provider}}}}}))
    return trial


def cell(task: str, model: str, status: str, trial: str, reason: str = "") -> dict:
    return {"task": task, "model": model, "status": status, "trial": trial, "reason": reason, "difficulty": "easy",
            "kind": "sum", "reward": {"correct": 1.0, "wrong": 0.0}.get(status), "tool_calls": 1, "tokens": 50,
            "seconds": 4.5, "fingerprint": "f", "attempts": 1}


@pytest.fixture
def run(tmp_path) -> Path:
    """Six steps of two rollouts, a resume after the third, an ungraded rollout, four cells of two tasks."""
    run = tmp_path / "run"
    run.mkdir()
    steps, rollouts = [], []
    for step in range(1, 7):
        worker, group = (100.0, step) if step <= 3 else (200.0, step - 3)
        when = worker + 10 * step
        steps.append({"step": step, "max_steps": 6, "time": when + 1, "seconds": 10.0, "reward_mean": 0.5,
                      "reward_std": 0.5, "correct": 1, "rollouts": 2, "tool_calls": 1.0, "tokens": 900,
                      "ratio_mean": 1.0, "ratio_min": 0.9, "ratio_max": 1.1, "fresh_ratio_mean": 1.0,
                      "staleness_mean": 0.5, "skipped_groups": {"stale": 2}, "notes": [],
                      "group_rows": [{"group": group}, {"group": group}]})
        for i, reward in enumerate((1.05, 0.0)):
            rollouts.append({"time": when, "worker": worker, "group": group, "reward": reward, "tool_calls": 1,
                             "task": f"train_{step}", "trial": f"train-{step}-{i}", "seconds": 3.0, "reason": ""})
            write_trial(run, f"train-{step}-{i}", tool(f"echo {step}-{i}", f"out {step}-{i}") +
                        event("text", type="text", text=f"Answered {step}-{i}."), reward=reward)
    rollouts.append({"time": 261.0, "worker": 200.0, "group": 7, "reward": None, "tool_calls": 0, "task": "train_7",
                     "trial": "train-7-0", "seconds": 1.0, "reason": "the sandbox did not start"})
    (run / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (run / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rollouts))
    cells = [cell("t1", "base", "wrong", "eval-1-base"), cell("t1", "adapter", "correct", "eval-1-adapter"),
             cell("t2", "base", "wrong", "eval-2-base"),
             cell("t2", "adapter", "ungraded", "eval-2-adapter", "AgentSetupError: no space left")]
    for c in cells:
        write_trial(run, c["trial"], tool("cat data.csv", f"rows for {c['trial']}") +
                    event("text", type="text", text="Done."))
    (run / "eval").mkdir()
    (run / "eval/cells.jsonl").write_text("".join(json.dumps(c) + "\n" for c in cells))
    result = report.compare([c for c in cells if c["model"] == "base"], [c for c in cells if c["model"] == "adapter"])
    (run / "eval/final_results.json").write_text(json.dumps(result | {"tasks": 2, "adapter_name": "adapter"}))
    return run


def written(run: Path) -> str:
    return "".join(p.read_text() for p in (run / "report").iterdir() if p.suffix != ".png")


def test_tables_curves_and_every_rollout(run, capsys):
    assert report_command.main([str(run), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "6 steps up to step 6 of 6" in out and "groups left out: 2 stale" in out
    assert "| 6    |  0.500 |     1/2 | 1.0000 |   1.0 |       90 |" in out and "| 4 " not in out
    assert "1.000 [0.207, 1.000]" in out and "0 + 1" in out
    for name in ("training.png", "eval.png"):
        Image.open(run / "report" / name).verify()
    found = run_report.of_folder(run, 2)
    assert [(r["section"], r["trial"]) for r in found.rollouts] == [
        ("step 6", "train-6-0"), ("step 6", "train-6-1"), ("step 5", "train-5-0"), ("step 5", "train-5-1"),
        ("not trained", "train-7-0"),
        ("evaluation: adapter", "eval-1-adapter"), ("evaluation: adapter", "eval-2-adapter"),
        ("evaluation: base", "eval-1-base"), ("evaluation: base", "eval-2-base")]
    first = found.rollouts[0]
    assert [turn["role"] for turn in first["turns"]] == ["user", "tool", "model"]
    assert first["turns"][1] == {"role": "tool", "tool": "bash", "arguments": "command: echo 6-0", "result": "out 6-0"}
    assert found.rollouts[4]["notes"] == ["the folder of this trial is not here"]


def test_a_browser_shows_calls_rewards_and_reasons_and_runs_nothing(run, tmp_path):
    trial = run / "trials/eval-1-adapter"
    (trial / "agent/opencode.txt").write_text(tool(f"echo '{HOSTILE}'", f"read: {HOSTILE} end of output"))
    with (run / "eval/cells.jsonl").open("a") as file:
        file.write(json.dumps(cell(HOSTILE, "adapter", "wrong", HOSTILE, HOSTILE)) + "\n")
    report_command.write(found := run_report.of_folder(run, 6), report_command.tables(found, 6), run / "report")
    with Browser(tmp_path / "profile") as browser:
        browser.open(run / "report/index.html")
        shown = "document.getElementById('train-6-0').innerText"
        assert "echo 6-0" not in browser.js(shown), "a closed rollout shows its line only"
        assert "correct" in browser.js(shown) and "reward 1.050" in browser.js(shown)
        browser.js("document.querySelector('#train-6-0 summary').click()")
        for expected in ("The question of train-6-0", "tool call: bash", "echo 6-0", "out 6-0", "Answered 6-0."):
            assert expected in browser.js(shown)
        browser.js("document.querySelector('#eval-2-adapter summary').click()")
        ungraded = browser.js("document.getElementById('eval-2-adapter').innerText")
        assert "no reward" in ungraded and "Why it is ungraded: AgentSetupError: no space left" in ungraded
        # hostile output is text, inside its own rollout, and nothing of it runs or is fetched
        browser.js("document.querySelector('#eval-1-adapter summary').click()")
        hostile = browser.js("document.getElementById('eval-1-adapter').innerText")
        assert "<script>window.pwned=1</script>" in hostile and "end of output" in hostile
        assert "\x1b" not in hostile and "\u202e" not in hostile
        assert browser.js("window.pwned === undefined && document.scripts.length === 0")
        assert browser.js("document.querySelectorAll('img').length") == 2, "the two curves"
        assert browser.js("[...document.images].every(image => image.naturalWidth > 500)")
        assert [url for url in browser.requests if not url.startswith("data:")] == [
            (run / "report/index.html").resolve().as_uri()]
        # the choice of a status hides the others
        browser.js("document.getElementById('only-ungraded').click()")
        all_of_them = "[...document.querySelectorAll('details')]"
        assert browser.js(f"{all_of_them}.length") == 18
        assert browser.js(f"{all_of_them}.filter(d => d.checkVisibility()).map(d => d.id)") == [
            "train-7-0", "eval-2-adapter"]


def test_planted_secrets_are_nowhere_in_the_report(run, monkeypatch, capsys):
    monkeypatch.setenv("CAPTURE_ADMIN_KEY", SECRETS["environment"])
    write_trial(run, "train-7-0", event("text", type="text", text="x"), key=SECRETS["other session"])
    planted = "\n".join([f"HF_TOKEN={SECRETS['token']}", f'"apiKey": "{SECRETS["session"]}"', SECRETS["other session"],
                         f"admin {SECRETS['environment']}", f"Authorization: Bearer {SECRETS['bearer']}",
                         f"DB_PASSWORD: {SECRETS['assigned']}", "tokens: 12345678 are counted"])
    trial = run / "trials/eval-1-adapter"
    (trial / "agent/opencode.txt").write_text(
        tool(f"curl -H 'x-api-key: {SESSION_KEY}' {SECRETS['token']}", planted) + event(
            "text", type="text", text=f"The token is {SECRETS['token']}.") + event("error", message=planted))
    (trial / "verifier/test-stdout.txt").write_text(planted)
    (trial / "result.json").write_text(json.dumps({"exception_info": {"exception_type": "E",
                                                                      "exception_message": planted}}))
    with (run / "eval/cells.jsonl").open("a") as file:
        file.write(json.dumps(cell("t3", "base", "ungraded", "", f"refused {SECRETS['token']}")) + "\n")
    assert report_command.main([str(run)]) == 0
    everything = written(run) + capsys.readouterr().out
    assert {name for name, secret in SECRETS.items() if secret in everything} == set()
    assert "[Hugging Face token removed]" in everything and "tokens: 12345678 are counted" in everything


def test_a_secret_at_the_cut_of_a_long_text_goes_as_a_whole(run):
    long = "a" * (10_000 - 10) + SECRETS["token"] + "\n" + "b" * 50_000
    (run / "trials/eval-1-adapter/agent/opencode.txt").write_text(tool("cat big", long))
    rollouts = {r["trial"]: r for r in run_report.of_folder(run, 1).rollouts}
    result = rollouts["eval-1-adapter"]["turns"][1]["result"]
    assert "characters left out" in result and len(result) < 21_000 and "hf_" not in result


@pytest.mark.parametrize("text", [
    "token = tokenizer.decode(ids)", "max_token: 40960000", "the secret: none", "password policy", "api_key=$API_KEY",
    "tokens a second: 1234.5678", "sorted(0123)"])
def test_ordinary_text_is_left_alone(text):
    assert redact.Redactor(environ={"TOKENIZERS_PARALLELISM": "false", "MY_TOKEN": "short"}).text(text) == text


def test_damaged_trials_and_logs_still_give_a_report(run, capsys):
    trials = run / "trials"
    full = (trials / "train-6-0/agent/opencode.txt").read_text()
    (trials / "train-6-0/agent/opencode.txt").write_text(full[: len(full) - 20])  # killed in the middle of a line
    (trials / "train-6-1/agent/opencode.txt").write_bytes(b"\xff\xfe not json\n[1, 2]\n\"text\"\n{\"type\": 3}\n")
    (trials / "train-6-1/agent/trajectory.json").write_text('{"steps": [7, {"source": "user", "message": "Asked"}, '
                                                            '{"tool_calls": 5, "observation": {"results": 3}}]}')
    (trials / "train-5-0/agent/trajectory.json").write_text('{"steps": [')
    (trials / "train-5-0/result.json").write_text("[]")
    shutil.rmtree(trials / "train-5-1")
    shutil.rmtree(trials / "eval-1-base/agent")
    (trials / "eval-2-base/agent/opencode.txt").write_text(
        event("tool_use", type="tool", tool="bash", state={"status": "running", "input": {"command": "sleep 999"}}) +
        event("tool_use", type="tool", tool="bash", state={"status": "error", "input": "?", "error": "denied"}))
    for name in ("metrics.jsonl", "rollouts.jsonl", "eval/cells.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 7, "ti')
    (run / "eval/checkpoint-2_results.json").write_text('{"adapter":')
    assert report_command.main([str(run), "--steps", "2"]) == 0
    assert "eval/checkpoint-2_results.json can't be read" in capsys.readouterr().out
    by_trial = {r["trial"]: r for r in run_report.of_folder(run, 2).rollouts}
    assert [t["role"] for t in by_trial["train-6-0"]["turns"]] == ["user", "tool"]
    assert [t.get("text") for t in by_trial["train-6-1"]["turns"]] == ["Asked"]
    assert {"trajectory.json is cut off", "result.json is not what it should be"} <= set(by_trial["train-5-0"]["notes"])
    assert by_trial["train-5-1"]["notes"] == ["the folder of this trial is not here"]
    assert "the agent left no conversation" in by_trial["eval-1-base"]["notes"]
    assert [t.get("result") for t in by_trial["eval-2-base"]["turns"][1:]] == ["(it did not end)", "denied"]


def test_runs_that_have_little_to_show(tmp_path, run, capsys):
    assert report_command.main([str(tmp_path / "none")]) == 64
    (tmp_path / "empty").mkdir()
    assert report_command.main([str(tmp_path / "empty")]) == 64
    assert "it has neither metrics.jsonl nor eval/cells.jsonl" in capsys.readouterr().err
    (run / "rollouts.jsonl").unlink()
    shutil.rmtree(run / "eval")
    assert report_command.main([str(run)]) == 0, "a training that has no evaluation yet, and no record of rollouts"
    assert "the trials can't be assigned to steps" in capsys.readouterr().out


def test_the_step_that_a_resumed_run_made_again_counts_once(run):
    again = json.loads((run / "metrics.jsonl").read_text().splitlines()[2]) | {"reward_mean": 0.9}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    steps = run_report.of_folder(run, 1).steps
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6] and steps[2]["reward_mean"] == 0.9


def test_without_the_environment_it_says_how_to_get_it(run):
    environ = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-S", str(REPO / "report.py"), str(run)], cwd=REPO, env=environ,
                          capture_output=True, text=True)
    assert done.returncode == 69 and 'eval "$(bash setup.sh --local)"' in done.stderr
