"""run_eval.sh as a whole: real servers, tiny model, real OpenCode in sandboxes, and a second run that goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from env_server_process import needed
from loopback import job_ports
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from recipe.config import REPO

N_TASKS, SAMPLES = 1, 2
N_CELLS = 2 * N_TASKS * SAMPLES


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not below pytest's tmp_path: under proot the agent runs as nobody and has to be able to enter.
    path = Path(tempfile.mkdtemp(prefix="recipe-eval-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def run_eval(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: os.environ[k] for k in ("PATH", "HOME", "TMPDIR", "CACHE_DIR", "HF_HUB_OFFLINE") if k in os.environ}
    env |= {name: needed(name) for name in ("TRAINER_PYTHON", "ENV_PYTHON", "OPENCODE_BIN")}
    env |= job_ports()
    env |= {"RUN_DIR": str(folder / "run"), "N_TASKS": str(N_TASKS), "K_SAMPLES": str(SAMPLES),
            "MAX_MODEL_CALLS": "2", "AGENT_TIMEOUT": "900"}
    return subprocess.run(["bash", str(REPO / "run_eval.sh"), "--local", *arguments], env=env, text=True, timeout=1800,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_base_against_adapter_and_resume(folder):
    adapter = folder / "adapter"
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(REPO / "tiny" / "model"), LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).save_pretrained(adapter)

    first = run_eval(folder, "--adapter", str(adapter))
    assert first.returncode == 0, first.stdout
    run = folder / "run"
    cells = [json.loads(line) for line in (run / "eval" / "cells.jsonl").read_text().splitlines()]
    assert len(cells) == N_CELLS and len({c["task"] for c in cells}) == N_TASKS
    assert {(c["model"], c["sample"]) for c in cells} == {(m, s) for m in ("base", "adapter") for s in range(SAMPLES)}
    for cell in cells:
        assert cell["status"] in ("correct", "wrong") and cell["kind"] and cell["difficulty"]
        assert {*cell["phases"]} == {"sandbox", "agent", "model", "verifier"} and cell["phases"]["model"] > 0
        assert 1 <= cell["model_calls"] <= 2 and cell["tokens"] > 0 and (run / "trials" / cell["trial"]).is_dir()
    result = json.loads((run / "eval" / "final_results.json").read_text())
    assert result["engine"]["base_against_files"] < 1e-4 < result["engine"]["adapter_against_base"]
    assert sum(result["agreement"][k] for k in ("both", "only_base", "only_adapter", "neither")) == N_TASKS * SAMPLES
    assert len(result["base"]["samples"]) == SAMPLES and result["tasks"] == N_TASKS
    assert "exact McNemar p" in first.stdout and "only base" in (run / "eval" / "final_results.md").read_text()
    assert not list((run / "sandboxes").glob("*")), "sandboxes were left behind"

    # An interrupted run: one cell is missing, the other three are taken from the file.
    (run / "eval" / "cells.jsonl").write_text("".join(json.dumps(c) + "\n" for c in cells[:-1]))
    second = run_eval(folder, "--adapter", str(adapter))
    assert second.returncode == 0, second.stdout
    assert f"{N_CELLS - 1} of {N_CELLS} cells are taken from" in second.stdout
    again = [json.loads(line) for line in (run / "eval" / "cells.jsonl").read_text().splitlines()]
    assert again[:-1] == cells[:-1] and len(again) == len(cells)
    assert [again[-1][key] for key in ("task", "model", "sample")] == [
        cells[-1][key] for key in ("task", "model", "sample")]


def test_an_incomplete_adapter_is_refused_before_any_server(folder):
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    refused = run_eval(folder, "--adapter", str(folder / "adapter"))
    assert refused.returncode == 64, refused.stdout
    assert "lacks adapter_model.safetensors" in refused.stdout
    assert not (folder / "run" / "logs" / "policy.log").exists()
