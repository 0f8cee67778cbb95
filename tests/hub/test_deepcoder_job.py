"""`RECIPE=deepcoder bash run_job.sh --local` as a whole: a dataset on the double, all weights trained, evaluation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from env_server_process import needed
from hub_double import HubDouble, hub_environ
from loopback import job_ports
from test_deepcoder_tasks import published

from recipe import made_problems
from recipe.config import REPO
from recipe.sandbox_files import marked_processes

STEPS, GROUP, HELD_OUT, LIMIT_S = 3, 2, 1, 1800


@pytest.mark.long
def test_the_second_recipe_runs_to_its_evaluation(hub: HubDouble, folder: Path):
    from transformers import AutoModelForCausalLM

    hub.repo("owner/problems", "dataset").add("problems", published(made_problems.rows(8)))
    run = folder / "run"
    keep = ("PATH", "HOME", "TMPDIR", "LANG")
    environ = {name: os.environ[name] for name in keep if name in os.environ} | hub_environ(hub, folder / "hf") | {
        **{name: needed(name) for name in ("TRAINER_PYTHON", "ENV_PYTHON", "OPENCODE_BIN")},
        **job_ports(),
        "RECIPE": "deepcoder", "DATASET": "owner/problems", "RUN_DIR": str(run), "MAX_STEPS": str(STEPS),
        # All weights, as the recipe's own preset has it; --local alone would train the tiny model's adapter.
        "LORA": "0", "LEARNING_RATE": "1e-4", "SAVE_STEPS": "0", "NUM_GENERATIONS": str(GROUP),
        "MAX_INFLIGHT": str(GROUP), "N_TRAIN_TASKS": "4", "N_TASKS": str(HELD_OUT), "EVAL_CONCURRENCY": "1",
        "MAX_MODEL_CALLS": "3", "MAX_OUTPUT_TOKENS": "128"}
    done = subprocess.run(["bash", "run_job.sh", "--local"], cwd=REPO, env=environ, capture_output=True, text=True,
                          timeout=LIMIT_S)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log

    assert hub.count(r"GET .*problems/resolve/.*train-00000") == 1, "the dataset was read, and once for both splits"
    assert f"step {STEPS}/{STEPS} | reward" in log and "trained pass@1" in log
    result = json.loads((run / "eval/final_results.json").read_text())
    assert result["tasks"] == HELD_OUT and result["base"]["ungraded"] + result["adapter"]["ungraded"] == 0
    assert result["adapter_path"] == str(run / "model")
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert {r["reward"] for r in rollouts if r["reward"] is not None} <= {0.0, -0.1}, "the tiny model solves none"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["rollouts"] + s["ungraded_rollouts"] for s in steps] == [GROUP] * STEPS
    fresh = [row["ratio"] for s in steps for row in s["group_rows"] if row["fresh"]]
    assert all(abs(ratio - 1) < 1e-3 for ratio in fresh), fresh

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    base = AutoModelForCausalLM.from_pretrained(REPO / "tiny/model")
    assert model.state_dict().keys() == base.state_dict().keys()
    assert not list(run.glob("checkpoints/checkpoint-*")) and not (run / "adapter").exists()
    assert not marked_processes(run_id=str(run)) and not [p for p in (run / "sandboxes").iterdir()]
    for trial in {r["trial"] for r in rollouts if r["reward"] is not None}:
        assert (run / "trials" / trial / "verifier/reward.txt").is_file()
