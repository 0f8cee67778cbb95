"""What the benchmarks compute from what they measured, without a GPU."""

from __future__ import annotations

import contextlib
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

from bench.common import table
from bench.loop import figures
from bench.model import make_config
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
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 143
        with pytest.raises(ProcessLookupError):
            os.killpg(int(log.read_text()), 0)
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.killpg(int(log.read_text()), signal.SIGKILL)


def test_decoding_is_measured_while_all_requests_decode():
    """One has its prompt done a second late; the other, alone so far, has sampled half of its tokens by then."""
    early, late = [i / 10 for i in range(21)], [1 + i / 20 for i in range(21)]
    assert decoding([early, late], 21) == pytest.approx(10 + 20)
    assert decoding([early, [3.0, 3.1]], 21) is None, "they were never at it together"


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


def test_figures_of_a_run_leave_its_first_steps_out():
    steps = [{"seconds": 60.0 if i < 3 else 6.0, "rollouts": 8, "tokens": 1000, "reward_mean": i / 10,
              "fresh_ratio_mean": 1 + i / 1e4, "trl": {"perf/weight_sync_s": 0.2, "sync/paused_s": 0.05}}
             for i in range(10)]
    found = figures(steps, 2)
    assert found["s a step"] == 6 and found["rollouts a minute"] == 80 and found["paused s"] == 0.05
    assert found["$ for 1,000 steps"] == pytest.approx(1000 * 6 / 3600 * 10, abs=0.01)
    assert found["reward first, last"] == "0.200, 0.700" and found["ratio of fresh rows"] == "1.00030 to 1.00090"
    assert table([{"a": 1234.5678, "b": None}]).splitlines() == ["| a | b |", "| --- | --- |", "| 1,235 |  |"]
