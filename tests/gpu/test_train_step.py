"""The trainer's own forward at LFM2.5-2.6B's shape: each attention backend that runs here keeps packed rows apart."""

from __future__ import annotations

import gc

import pytest
import torch

from bench.train_step import load, measure, rows_of
from recipe import isolation_check, speed
from recipe.attention import NAMES, unavailable


@pytest.fixture(params=list(NAMES))
def backend(request) -> str:
    why = unavailable(request.param, "bfloat16")
    if why:
        pytest.skip(f"{request.param}: {why}")
    yield request.param
    gc.collect()
    torch.cuda.empty_cache()


def test_packed_sequences_are_isolated(large_model, backend):
    with torch.autocast("cuda", torch.bfloat16):
        leaking = isolation_check.measure(load(large_model, backend, isolated=False, checkpointing=False))
        found = isolation_check.measure(load(large_model, backend, isolated=True, checkpointing=False))
    print(f"{backend}: {found}; without isolation {leaking.influence:.1e} nats")
    found.require()
    assert leaking.influence > isolation_check.INFLUENCE, "the check cannot tell"


def test_a_step_runs_with_checkpointing_and_moves_nothing_but_the_adapter(large_model, backend):
    model = load(large_model, backend, isolated=True, checkpointing=True)
    base = model.get_base_model().model.layers[0].feed_forward.w1.base_layer.weight
    before = base.detach().clone()
    steps, peak = measure(model, rows_of([700, 1300], True, model.config.vocab_size), 1)
    assert torch.equal(base, before) and steps[0]["backward"] > 0 and peak < 60
    assert all(torch.isfinite(p).all() for p in model.parameters() if p.requires_grad)


def test_compiled_layers_and_kept_activations_change_only_roundings(large_model):
    """A compiled step is as near to the same step in float32 as one layer by layer is."""
    assert speed.compiler_fails() is None
    grads, row = {}, None
    for name in ("float32", "layer by layer", "compiled"):
        torch.manual_seed(0)
        exact, compiled = name == "float32", name == "compiled"
        model = load(large_model, "sdpa-packed" if exact else "varlen", isolated=True, checkpointing=True,
                     plain=compiled, compiled=compiled)
        if exact:
            model = model.float()
        speed.recompute(model, not compiled)
        if row is None:
            (row,) = rows_of([700, 1300], True, model.config.vocab_size)
        with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
            loss = -model(**row, fused_lm_head=True, use_cache=False).log_probs.float().mean()
        loss.backward()
        grads[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
        del model, loss
        gc.collect()
        torch.cuda.empty_cache()
    exact = grads.pop("float32")
    apart = {name: float((grad - exact).norm() / exact.norm()) for name, grad in grads.items()}
    print(f"gradients apart from float32's, relative: {apart}")
    assert 0 < apart["compiled"] < 1.2 * apart["layer by layer"] < 0.12
