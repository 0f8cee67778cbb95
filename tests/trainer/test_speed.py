"""The trainer's speed-ups compute what the plain model computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from lfm2_small import fill_adapter, packed, small_model
from peft import get_peft_model

from recipe import attention, short_conv, speed
from recipe.config import REPO, Settings
from recipe.lfm2 import lora_config


@pytest.fixture(autouse=True)
def registered():
    attention.register()
    torch._dynamo.reset()


def adapted(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A small PEFT model whose adapter acts, with gradient checkpointing enabled."""
    base = small_model(std=0.25, attn_implementation=attention.SDPA_PACKED).to(dtype)
    model = get_peft_model(base, lora_config(Settings.load({"LORA_R": "8", "LORA_ALPHA": "16"})))
    fill_adapter(model, seed=5)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    short_conv.isolate(model)
    return model.train()


def step(model: torch.nn.Module, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a packed row and the adapter's gradient."""
    ids, positions = packed(lengths)
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    logits.pow(2).mean().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_compiled_layers_compute_the_same_for_rows_of_any_length():
    plain, compiled = adapted(), adapted()
    assert speed.compile_layers(compiled, backend="aot_eager") == 4
    for lengths in ([9, 4], [5], [20, 11, 3]):
        for kept in (False, True):
            speed.recompute(compiled, not kept)
            (logits, gradient), (found, found_gradient) = step(plain, lengths), step(compiled, lengths)
            assert torch.allclose(logits, found, atol=1e-5)
            assert float((gradient - found_gradient).norm() / gradient.norm()) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def test_a_row_without_recomputation_runs_each_layer_once():
    model, runs = adapted(), []
    for layer in speed.decoder_layers(model):
        layer.feed_forward.register_forward_pre_hook(lambda *_: runs.append(1))
    for on, times in ((True, 2), (False, 1), (True, 2)):
        runs.clear()
        speed.recompute(model, on)
        step(model, [6, 3])
        assert len(runs) == 4 * times


def test_plain_inputs_are_the_same_numbers_under_autocast():
    cast, plain = adapted(torch.bfloat16), adapted(torch.bfloat16)
    assert speed.plain_inputs(plain) > 0
    with torch.autocast("cpu", torch.bfloat16):
        (logits, gradient), (found, found_gradient) = step(cast, [9, 4]), step(plain, [9, 4])
    assert torch.equal(logits, found) and torch.equal(gradient, found_gradient)
    with pytest.raises(RuntimeError, match="dtype"):  # without autocast nobody casts any more
        step(plain, [9, 4])


def test_a_machine_that_cannot_compile_is_noticed_before_it_trains(tmp_path):
    done = subprocess.run([sys.executable, "-c", "from recipe import speed; print(speed.compiler_fails('cpu'))"],
                          cwd=REPO, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CXX": "/bin/false"},
                          capture_output=True, text=True)
    assert "Error" in done.stdout and len(done.stdout.splitlines()) == 1, done.stdout + done.stderr
