"""The whole local job on vLLM, whose engine is killed inside a weight sync, ends soon and with its message."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from gpu_server import CACHE, ONE_GPU
from loopback import job_ports

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 60  # from the engine's death to the end of the job


@pytest.mark.parametrize("gpus", [1, 2])
def test_an_engine_that_dies_inside_a_sync_ends_the_job(gpus, tmp_path):
    if gpus > torch.cuda.device_count():
        pytest.skip(ONE_GPU)
    environ = os.environ | job_ports() | {
        "RUN_DIR": str(tmp_path), "GPUS": str(gpus), "TRAIN_SCRIPT": "tests/gpu/killing_training.py", "KILL_AT": "3",
        "ENGINE": "vllm", "MAX_STEPS": "20", "N_TASKS": "2", "NUM_GENERATIONS": "4",
        "MAX_INFLIGHT": "8", "VLLM_FLAGS": CACHE, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    log = tmp_path / "out"
    with log.open("wb") as output:
        job = subprocess.Popen(["bash", "run_job.sh", "--local"], cwd=REPO, env=environ, stdout=output,
                               stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code = job.wait(600)
        finally:  # of an interrupted test nothing is left on the GPUs
            job.terminate()
            job.wait(120)
    ended, said = time.time(), log.read_text(errors="replace")
    assert (tmp_path / "killed").exists(), said[-3000:]
    seconds = ended - float((tmp_path / "killed").read_text())
    training = (tmp_path / "logs" / "train.log").read_text(errors="replace")
    print(f"{gpus} GPUs: ended {seconds:.1f} s after the kill, with {code}")
    print("\n".join(line[:300] for line in said.splitlines() if "ERROR" in line or "Resume" in line))
    print("\n".join(line[:300] for line in training.splitlines() if "WeightSyncError" in line))
    assert code == 69
    assert "WeightSyncError" in training, "the kill came between two syncs"
    assert seconds < LIMIT_S
    assert "Resume with: " in said and ("process 'policy'" in said or "step 'train' failed" in said)
    assert "one NCCL broadcast" in training if gpus == 2 else "CUDA IPC" in training
    assert not (tmp_path / "processes").exists()
