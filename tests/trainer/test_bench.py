"""What the benchmarks compute from what they measured, without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from lfm2_small import small_model
from test_weight_sync import adapted
from torch.utils.flop_counter import FlopCounterMode

from bench import modes, sampling
from bench.common import RESULTS, table
from bench.loop import Watch, figures
from bench.model import TINY, make_config
from bench.sampling import decoding
from bench.train_step import TRAINED, flops
from bench.weight_sync import InFlight, wrong_parameters
from recipe.config import REPO
from recipe.vllm_weights import checksum
from recipe.weight_sync import merged_parameters


def test_the_shape_is_that_of_lfm2_5_2_6b():
    config = make_config()
    assert config.layer_types.count("full_attention") == 10 and config.layer_types.count("conv") == 20
    with torch.device("meta"):
        from transformers import Lfm2ForCausalLM

        assert sum(p.numel() for p in Lfm2ForCausalLM(config).parameters()) == 2_556_677_376
    assert {"conv_dim", "block_dim", "block_multiple_of"} <= config.to_dict().keys(), "vLLM reads these"


def test_flops_are_those_that_pytorch_counts():
    """PyTorch counts the whole square of attention, of which causal kernels compute half, the head on every token, and
    the convolutions, three multiplications a channel, which are left out here."""
    model = small_model().requires_grad_(False)
    model.set_attn_implementation("eager")
    config, length = model.config, 96
    inputs = torch.randn(1, length, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        loss = model(inputs_embeds=inputs, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    head = 2 * config.vocab_size * config.hidden_size * length * (1 - TRAINED)
    square = config.layer_types.count("full_attention") * 2 * config.hidden_size * length**2

    def counted(counter: FlopCounterMode) -> float:
        return sum(n for op, n in counter.get_flop_counts()["Global"].items() if "conv" not in str(op))

    ours, back = flops(model, [length])
    assert counted(forward) == pytest.approx(ours + square + head, rel=1e-3)
    # eager attention keeps its matrices: its backward is twice the forward, flash computes one product again
    assert counted(backward) == pytest.approx(back + (2 * 2 - 2.5) * square + head, rel=1e-3)


def test_a_benchmark_that_is_ended_takes_its_server_along(tmp_path):
    log = tmp_path / "server.log"
    code = f"""
import subprocess
from pathlib import Path
from bench import common
popen = subprocess.Popen
subprocess.Popen = lambda _, **kwargs: popen(["bash", "-c", "echo $$; sleep 300"], **kwargs)
with common.Server(Path("model"), 9, Path({str(log)!r})):
    pass
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO)
    try:
        deadline = time.monotonic() + 240
        while not (log.exists() and log.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(240) == 143
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:  # whoever adopts what was killed has to take note of its end
                os.killpg(int(log.read_text()), 0)
                time.sleep(0.05)
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.killpg(int(log.read_text()), signal.SIGKILL)


def test_decoding_is_measured_while_all_requests_decode():
    """One has its prompt done a second late; the other, alone so far, has sampled half of its tokens by then."""
    early, late = [i / 10 for i in range(21)], [1 + i / 20 for i in range(21)]
    assert decoding([early, late], 21) == pytest.approx(10 + 20)
    assert decoding([early, [3.0, 3.1]], 21) is None, "they were never at it together"


def test_sampling_keeps_what_was_measured_before_a_signal(tmp_path, monkeypatch):
    class Server:
        start_seconds = 1.0

        def __init__(self, model, port, log, **settings):
            self.ends = "VLLM_FLAGS" in settings

        def __enter__(self):
            return sys.exit(143) if self.ends else self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(sampling, "Server", Server)
    monkeypatch.setattr(sampling, "require_gpu", lambda: None)
    monkeypatch.setattr(sampling, "make_model", lambda folder: folder)
    monkeypatch.setattr(sampling, "card_limits", lambda: {"copy_bytes_per_s": 1e12, "bf16_flops": 1e15})
    monkeypatch.setattr(sampling, "measure", lambda *_: dict.fromkeys(
        ("wall", "ttft", "second_wall", "decode", "second_ttft"), 1.0))
    code = sampling.main(["--model", str(TINY), "--variants", "recipe,eager,no-async", "--concurrency", "8",
                          "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert code == 143 and found["not_run"] == {"eager": "ended by a signal"}
    assert [row["variant"] for row in found["rows"]] == ["recipe"]
    read = found["weights_bytes"] + 8 * (8192 + 512 / 2) * found["cache_bytes_a_token"]
    assert found["rows"][0]["decoding limit tokens/s"] == round(8 / (read / 1e12)), "a step reads them once"


def test_committed_figures_stay_below_their_limits():
    rows = [row for path in RESULTS.glob("sampling-*.json") for row in json.loads(path.read_text())["rows"]]
    assert len(rows) > 10
    assert all(row["decoding tokens/s"] < row["decoding limit tokens/s"] for row in rows)
    rows = [row for path in RESULTS.glob("weight_sync-*.json") for row in json.loads(path.read_text())["rows"]]
    assert len(rows) > 3 and all(row["limit ms"] < row["paused ms"] for row in rows)


def test_gap_is_the_longest_silence_that_touches_the_sync():
    flight = InFlight.__new__(InFlight)
    flight.times = [10.0, 10.1, 10.2, 10.45, 10.5, 10.6, 11.4]
    assert flight.gap(10.21, 10.4) == pytest.approx(0.25)
    assert flight.gap(10.5, 10.55) == pytest.approx(0.1), "a silence before or after it is not the sync's"


def test_parameters_that_differ_are_named():
    model, _ = adapted(torch.bfloat16)
    fused: dict[str, list[torch.Tensor]] = {}
    for name, tensor in merged_parameters(model):
        name = name.replace(".conv.", ".short_conv.", 1)
        for old, new in (("attn.q_proj", "attn.qkv_proj"), ("attn.k_proj", "attn.qkv_proj"),
                         ("attn.v_proj", "attn.qkv_proj"), ("w1.", "w13."), ("w3.", "w13.")):
            name = name.replace(old, new)
        fused.setdefault(name, []).append(tensor)
    held = {name: torch.cat(parts) for name, parts in fused.items()}

    class Engine:
        def _worker(self, method):
            return {name: checksum(tensor) for name, tensor in held.items()}

    assert wrong_parameters(model, Engine()) == []
    spoiled = "model.layers.0.feed_forward.w13.weight"
    held[spoiled] = held[spoiled].flip(0)
    assert wrong_parameters(model, Engine()) == [spoiled]


def steps_of(number: int) -> list[dict]:
    return [{"seconds": 60.0 if i < 3 else 6.0, "rollouts": 8, "tokens": 1000, "reward_mean": i / 10, "time": 100.0 + i,
             "fresh_ratio_mean": 1 + i / 1e4, "trl": {"perf/weight_sync_s": 0.2, "sync/paused_s": 0.05}}
            for i in range(number)]


def test_figures_of_a_run_leave_its_first_steps_out():
    found = figures(steps_of(10), 2)
    assert found["s a step"] == 6 and found["rollouts a minute"] == 80 and found["paused s"] == 0.05
    assert found["$ for 1,000 steps"] == pytest.approx(1000 * 6 / 3600 * 10, abs=0.01)
    assert found["reward first, last"] == "0.200, 0.700" and found["ratio of fresh rows"] == "1.00000 to 1.00090"
    assert table([{"a": 1234.5678, "b": None}]).splitlines() == ["| a | b |", "| --- | --- |", "| 1,235 |  |"]


def test_only_visible_gpus_are_watched(tmp_path, monkeypatch):
    """A machine of two GPUs whose second is busy in every second sample; without nvidia-smi nothing is said of them."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"""#!/bin/bash
echo x >>{tmp_path}/calls
busy=$((($(wc -l <{tmp_path}/calls) % 2) * 80))
case "$*" in *--id=1*) echo "1, $busy" ;; *) echo "0, 0"; echo "1, $busy" ;; esac
""")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def watched() -> dict[str, float]:
        watch = Watch()
        deadline = time.monotonic() + 30
        while len(watch.samples) < 4 and watch.thread.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        watch.ended.set()
        watch.thread.join()
        del watch.samples[4:]
        return watch.between(0, time.time())

    assert watched() == {"GPU 0 idle %": 100, "GPU 0 mean busy %": 0, "GPU 1 idle %": 50, "GPU 1 mean busy %": 40}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert watched() == {"GPU 1 idle %": 50, "GPU 1 mean busy %": 40}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert watched() == {}


def test_a_job_that_is_ended_leaves_the_figures_of_its_steps(tmp_path):
    metrics = "".join(json.dumps(step) + "\n" for step in steps_of(8))
    (tmp_path / "metrics").write_text(metrics)
    job = (f"trap 'echo ended; exit 143' TERM; mkdir -p $RUN_DIR/logs; cp {tmp_path}/metrics $RUN_DIR/metrics.jsonl; "
           "echo 'weights to vLLM 9.9 on a card: CUDA IPC' >$RUN_DIR/logs/train.log; echo trained; sleep 300 & wait")
    process = subprocess.Popen([sys.executable, "-m", "bench.loop", "--out", tmp_path / "loop.json", "--run", job],
                               cwd=REPO, env=os.environ | {"RUN_DIR": str(tmp_path / "run")}, text=True,
                               stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout.readline() == "trained\n"
        process.terminate()
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and said.startswith("ended\n"), said
        found = json.loads((tmp_path / "loop.json").read_text())
        assert (found["exit_code"], found["rows"][0]["s a step"]) == (143, 6.0)
        assert found["weights_to"] == "vLLM 9.9 on a card: CUDA IPC"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_one_gpu_beside_two(tmp_path):
    """The recipe's topology: half as long a step for twice the price; one figure of a GPU is the mean of the mode's."""
    def result(gpus: int, seconds: float, idle: list[float], command: str) -> str:
        row = {"GPUs": gpus} | figures([step | {"seconds": seconds} for step in steps_of(8)], gpus)
        row |= {f"GPU {gpu} idle %": value for gpu, value in enumerate(idle)}
        path = tmp_path / f"{gpus}.json"
        path.write_text(json.dumps({
            "versions": {"vllm": "0.26.0", "gpus": str(gpus), "date": f"day {gpus}"}, "rows": [row],
            "weights_to": f"vLLM on a card: way {gpus}", "arguments": {"run": f"env GPUS={gpus} {command} job.sh"}}))
        return str(path)

    one = result(1, 8.0, [10.0], "MODEL=/m MAX_STEPS=20 POLICY_PORT=1")
    two = result(2, 4.0, [20.0, 60.0], "MODEL=/m MAX_STEPS=10")
    assert modes.main([two, one, "--out", str(tmp_path / "modes.json")]) == 0
    found = json.loads((tmp_path / "modes.json").read_text())
    named = ("GPUs", "weights by", "s a step", "rollouts a minute", "GPU idle %", "$ an hour", "$ for 1,000 steps")
    assert [tuple(row[name] for name in named) for row in found["rows"]] == [
        (1, "way 1", 8.0, 60.0, 10.0, 5.0, 11.11), (2, "way 2", 4.0, 120.0, 40.0, 10.0, 11.11)]
    assert found["versions"] == {"vllm": "0.26.0"} and found["versions_that_differ"] == {"date": ["day 1", "day 2"]}
    assert found["settings_that_differ"] == {"MAX_STEPS": ["20", "10"]}
    with pytest.raises(SystemExit) as refused:
        modes.main([one, one])
    assert refused.value.code == 64
