"""report.py on a Hub repository: what training and watcher pushed, and what a run folder sent."""

from __future__ import annotations

import json

import pytest

import report as report_command
from recipe import hub as recipe_hub
from recipe import report

REPO = "me/adapter"


def cell(task: str, model: str, status: str) -> dict:
    return {"task": task, "model": model, "status": status, "trial": f"{task}-{model}", "reason": "", "tool_calls": 1,
            "tokens": 5, "seconds": 1.0, "difficulty": "easy", "reward": float(status == "correct")}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(recipe_hub, "FIRST_WAIT", 0.01)


@pytest.fixture
def repo(hub):
    """Two checkpoints, the older of which must not be read, and an evaluation of two tasks."""
    cells = [cell("t1", "base", "wrong"), cell("t2", "base", "wrong"), cell("t1", "adapter", "correct"),
             cell("t2", "adapter", "wrong")]
    result = report.compare(cells[:2], cells[2:]) | {"tasks": 2, "adapter_name": "adapter"}

    def state(steps: int) -> bytes:
        logs = [{"loss": 0.1, "step": s, "reward": s / 100, "reward_std": 0.1, "tools/call_frequency": 2.0,
                 "batch/forwarded_tokens_per_step": 800.0, "perf/rollout_wait_s": 6.0, "perf/fwd_bwd_s": 2.0,
                 "health/ratio_mean": 1.0, "health/ratio_min": 0.9, "health/ratio_max": 1.1}
                for s in range(1, steps + 1)]
        return json.dumps({"log_history": [*logs, {"train_runtime": 1.0}]}).encode()

    made = hub.repo(REPO)
    made.add("run", {"checkpoint-9/trainer_state.json": state(9), "checkpoint-10/trainer_state.json": state(10),
                     "checkpoint-10/optimizer.pt": b"large", "eval/final_cells.jsonl": "".join(
                         json.dumps(c) + "\n" for c in cells).encode(),
                     "eval/final_results.json": json.dumps(result).encode()})
    return made


def test_a_repository_gives_steps_results_and_cells(hub, repo, tmp_path, capsys):
    assert report_command.main([REPO, "--out", str(tmp_path / "out"), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "10 steps up to step 10, 1.3 minutes" in out and "| 10   |  0.100 |" in out and "| 8 " not in out
    assert "|      100 |" in out, "800 tokens in 8 seconds"
    assert "0.500 [0.095, 0.905]" in out and "conversations of this run are not in the repository" in out
    page = (tmp_path / "out/index.html").read_text()
    assert page.count('<details class="rollout') == 4 and (tmp_path / "out/training.png").exists()
    assert hub.count("GET .*optimizer.pt|checkpoint-9/") == 0, "only what is needed is downloaded"
    old = repo.commits[0].sha
    assert report_command.main([f"{REPO}@{old}", "--out", str(tmp_path / "old")]) == 64
    assert "holds no run" in capsys.readouterr().err


def test_what_a_run_folder_sent_is_what_the_repository_shows(hub, repo, tmp_path, capsys):
    run = tmp_path / "run"
    trial = run / "trials/train-0/agent"
    trial.mkdir(parents=True)
    (trial / "opencode.txt").write_text(json.dumps({"type": "text", "part": {"text": "I looked at the file."}}) + "\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(
        {"step": s, "time": 10.0 * s, "reward_mean": 0.5, "tokens": 80, "seconds": 1.0,
         "group_rows": [{"group": s}]}) + "\n" for s in range(1, 13)))
    (run / "rollouts.jsonl").write_text(json.dumps({"time": 119.0, "worker": 1.0, "group": 12, "reward": 1.0,
                                                    "task": "t", "trial": "train-0", "tool_calls": 0}) + "\n")
    hub.fail(1, 503, "/commit/")
    assert report_command.main([str(run), "--push", REPO]) == 0
    files = repo.files()
    assert {"report/run/index.html", "report/run/training.png", "report/run/conversations.jsonl"} <= files.keys()
    assert report_command.main([REPO, "--out", str(tmp_path / "out")]) == 0
    assert "12 steps up to step 12" in capsys.readouterr().out, "newer than the newest checkpoint"
    assert "I looked at the file." in (tmp_path / "out/index.html").read_text()


    repo.add("an older run", {"report/older/metrics.jsonl": b'{"step": 12, "reward_mean": 0.9}\n{"step": 3}\n'})
    assert report_command.main([REPO, "--out", str(tmp_path / "again"), "--steps", "1"]) == 0
    assert "| 12   |  0.500 |" in capsys.readouterr().out, "of a step that two runs made the later one counts"


def test_a_hub_that_does_not_answer_or_has_no_such_repository(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 2)
    assert report_command.main(["me/none", "--out", str(tmp_path / "out")]) == 69
    assert "me/none does not exist" in capsys.readouterr().err
    hub.fail(10_000, 503, "GET /api/")
    assert report_command.main([REPO, "--out", str(tmp_path / "out")]) == 69
    assert "still failing after 2 attempts" in capsys.readouterr().err
