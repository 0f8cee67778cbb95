"""Packed rows in LFM2's short convolutions: exact with the isolation, wrong without it."""

from __future__ import annotations

import random

import pytest
import torch
from lfm2_small import fill_adapter, packed, small_model
from peft import get_peft_model
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from recipe import attention, isolation_check
from recipe.attention import sequence_spans
from recipe.config import Settings
from recipe.isolation_check import LeakError
from recipe.lfm2 import lora_config
from recipe.short_conv import UnknownLfm2Code, check_shape, isolate, isolated_conv

ROUNDING = 1e-4  # of float32, which kernels of other processors order otherwise; a leak is 1e-2 and more
CONV_LORA = {"LORA_R": "8", "LORA_ALPHA": "16", "LORA_CONV": "1"}


@pytest.fixture(scope="module", autouse=True)
def registered():
    attention.register()


def adapted_model(isolated: bool = True, checkpointing: bool = False, **changes) -> torch.nn.Module:
    """A PEFT model whose adapter acts, on convolutions too, with packed attention."""
    base = small_model(std=0.25, attn_implementation=attention.SDPA_PACKED, **changes)
    model = get_peft_model(base, lora_config(Settings.load(CONV_LORA)))
    fill_adapter(model, seed=5)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    if isolated:
        assert isolate(model) == 2
    return model


def score(model: torch.nn.Module, lengths: list[int], separate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of every token but each sequence's first, and the adapter's gradient of their weighted sum."""
    ids, positions = packed(lengths, seed=sum(lengths))
    weights = torch.rand(ids.shape[1], generator=torch.Generator().manual_seed(2))
    spans, out = sequence_spans(positions[0]), []
    model.zero_grad()
    for a, b in spans if separate else [(0, ids.shape[1])]:
        logits = model(input_ids=ids[:, a:b], position_ids=positions[:, a:b], use_cache=False).logits[0]
        log_probs = logits[:-1].log_softmax(-1).gather(-1, ids[0, a + 1:b, None])[:, 0]
        scored = positions[0, a + 1:b] > 0
        (log_probs * weights[a + 1:b])[scored].sum().backward()
        out.append(log_probs[scored].detach())
    return torch.cat(out), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def differences(model: torch.nn.Module, lengths: list[int]) -> tuple[float, float]:
    """Packed against separate: largest log-prob difference, relative difference of the adapter's gradient."""
    (row, row_grad), (alone, alone_grad) = (score(model, lengths, separate) for separate in (False, True))
    return float((row - alone).abs().max()), float((row_grad - alone_grad).norm() / alone_grad.norm())


def random_lengths(seed: int) -> list[int]:
    """2 to 16 sequences of 1 to 30 tokens, with one of a single token and one shorter than most convolutions."""
    rng = random.Random(seed)
    lengths = [1, 2, *(rng.randint(1, 30) for _ in range(seed % 15))]
    rng.shuffle(lengths)
    return lengths


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_packed_equals_separate(taps, checkpointing):
    model = adapted_model(checkpointing=checkpointing, conv_L_cache=taps)
    cases = [random_lengths(seed) for seed in (14, *range(taps, 15, 5))] + [[9], [1, 7], [1, 1, 1, 4]]
    assert {len(c) for c in cases} >= {1, 2, 16}
    for lengths in cases:
        log_probs, gradients = differences(model, lengths)
        assert log_probs < ROUNDING and gradients < ROUNDING, lengths


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_without_the_isolation_the_same_rows_differ(checkpointing):
    model = adapted_model(isolated=False, checkpointing=checkpointing)
    worst = [differences(model, random_lengths(seed)) for seed in range(3, 15, 4)]
    assert all(log_probs > 1e-2 and gradients > 1e-2 for log_probs, gradients in worst), worst


def test_one_sequence_equals_the_stock_model():
    ids, positions = packed([23])
    stock, isolated = (small_model(attn_implementation="sdpa") for _ in range(2))
    isolate(isolated)
    with torch.no_grad():
        expected, found = (m(input_ids=ids, position_ids=positions, use_cache=False).logits for m in (stock, isolated))
    assert torch.allclose(expected, found, atol=ROUNDING)


def test_padded_batch_and_generation_stay_as_they_were():
    ids, _ = packed([12])
    batch, mask = ids.reshape(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    stock, isolated = (small_model(attn_implementation="sdpa") for _ in range(2))
    isolate(isolated)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected, found = (m(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False)
                           .logits[mask.bool()] for m in (stock, isolated))
    assert torch.allclose(expected, found, atol=ROUNDING)
    assert torch.equal(*(m.generate(ids, max_new_tokens=8, do_sample=False) for m in (stock, isolated)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_same_convolution_rounded_once(dtype):
    """Against PyTorch's own in float64, with a bias; and each sequence is rounded as it is alone, bit by bit."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape).to(dtype) for shape in ((1, 20, 8), (8, 3), (8,)))
    _, positions = packed([7, 1, 12])
    row = isolated_conv(hidden, weight, bias, positions)
    spans = sequence_spans(positions[0])
    alone = [isolated_conv(hidden[:, a:b], weight, bias, positions[:, a:b]) for a, b in spans]
    assert row.dtype == dtype and torch.equal(row, torch.cat(alone, dim=1))
    exact = [torch.nn.functional.conv1d(torch.nn.functional.pad(hidden[:, a:b].mT.double(), (2, 0)),
                                        weight[:, None].double(), bias.double(), groups=8) for a, b in spans]
    limit = 0.5 * torch.finfo(dtype).eps * torch.cat(exact, dim=-1).abs().mT * 2 + 1e-6
    assert bool(((row.double() - torch.cat(exact, dim=-1).mT).abs() <= limit).all())


def test_installed_once_and_only_on_the_loaded_model():
    model = small_model()
    assert isolate(model) == isolate(model) == 2
    assert all(len(layer._forward_pre_hooks) == (not layer.is_attention_layer) for layer in model.model.layers)
    assert "forward" not in vars(small_model().model.layers[0].conv)
    assert isolate(torch.nn.Linear(2, 2)) == 0


def test_what_cannot_be_kept_apart_is_refused():
    model = small_model(attn_implementation=attention.SDPA_PACKED)
    isolate(model)
    layer = model.model.layers[0]
    hidden = torch.zeros(1, 4, 32)
    with pytest.raises(ValueError, match="without position_ids"):
        layer(hidden)
    with pytest.raises(ValueError, match="without its decoder layer"):
        layer.conv(hidden)
    ids, positions = packed([3, 4])
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids, position_ids=positions, use_cache=True)


def test_another_transformers_is_refused(monkeypatch):
    check_shape()
    with pytest.raises(UnknownLfm2Code, match=r"Lfm2ShortConv.forward of transformers .* `a_new_kernel\(x\)`"):
        check_shape({Lfm2ShortConv.forward: ("seq_idx=seq_idx", "a_new_kernel(x)")})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_start_up_check_passes_isolated_and_stops_leaking_models(dtype):
    found = isolation_check.measure(adapted_model().to(dtype))
    found.require()
    assert found.influence == 0 and "influence on each other 0.0e+00" in str(found)
    assert isolation_check.measure(adapted_model(checkpointing=True).to(dtype)).influence == 0
    with pytest.raises(LeakError, match="influence .* Choose another ATTENTION"):
        isolation_check.measure(adapted_model(isolated=False).to(dtype)).require()


def test_start_up_check_leaves_gradients_alone():
    model = adapted_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    parameters[0].grad = torch.ones_like(parameters[0])
    isolation_check.measure(model)
    assert torch.equal(parameters[0].grad, torch.ones_like(parameters[0]))
    assert all(p.grad is None for p in parameters[1:])


def test_start_up_check_notices_attention_that_leaks():
    model = small_model(std=0.25, attn_implementation="sdpa")
    isolate(model)
    isolation_check.measure(model).require()  # transformers builds a mask of blocks from position_ids
    for layer in model.model.layers:  # without it, the row is one causal sequence
        layer.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}),
                                        with_kwargs=True)
    with pytest.raises(LeakError):
        isolation_check.measure(model).require()
