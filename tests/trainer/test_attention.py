"""Packed attention: sequences of one row do not see each other."""

from __future__ import annotations

import inspect

import pytest
import torch
from lfm2_small import packed, small_model

from recipe import attention
from recipe.attention import packed_attention, sequence_spans
from recipe.config import SettingsError

LENGTHS = [5, 1, 9, 2, 17]


@pytest.fixture(scope="module", autouse=True)
def registered():
    attention.register()


def test_spans_follow_the_resets_of_position_ids():
    _, positions = packed(LENGTHS)
    assert sequence_spans(positions[0]) == [(0, 5), (5, 6), (6, 15), (15, 17), (17, 34)]
    assert sequence_spans(torch.arange(4)) == [(0, 4)]
    assert sequence_spans(torch.tensor([0])) == [(0, 1)]


def attention_layers_only(implementation: str) -> torch.nn.Module:
    return small_model(layer_types=["full_attention"] * 3, num_hidden_layers=3, attn_implementation=implementation)


def test_packed_row_equals_separate_sequences():
    ids, positions = packed(LENGTHS)
    model = attention_layers_only(attention.SDPA_PACKED)
    with torch.no_grad():
        row = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=ids[:, a:b], position_ids=positions[:, a:b], use_cache=False).logits[0]
                           for a, b in sequence_spans(positions[0])])
    assert (row - alone).abs().max() < 1e-4
    # the same row as one sequence differs: the figures above would notice a leak
    with torch.no_grad():
        leaking = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits[0]
    assert (leaking - alone).abs().max() > 1e-2


def test_gradients_of_a_packed_row_equal_those_of_separate_sequences():
    ids, positions = packed(LENGTHS)
    spans = sequence_spans(positions[0])
    gradients = []
    for pieces in ([(0, ids.shape[1])], spans):
        model = attention_layers_only(attention.SDPA_PACKED)
        for a, b in pieces:
            logits = model(input_ids=ids[:, a:b], position_ids=positions[:, a:b], use_cache=False).logits[0]
            logits.log_softmax(-1).gather(-1, ids[0, a:b, None]).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


def test_one_sequence_equals_transformers_own_sdpa():
    ids, positions = packed([23])
    with torch.no_grad():
        ours, theirs = (small_model(attn_implementation=name)(input_ids=ids, position_ids=positions, use_cache=False)
                        .logits for name in (attention.SDPA_PACKED, "sdpa"))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrong", ["mask", "batch", "no positions", "cache"])
def test_what_cannot_be_told_apart_is_refused(wrong):
    module = small_model().model.layers[1].self_attn
    query, key = torch.zeros(2 if wrong == "batch" else 1, 4, 6, 8), torch.zeros(1, 2, 8 if wrong == "cache" else 6, 8)
    positions = None if wrong == "no positions" else torch.arange(6)[None]
    mask = torch.ones(1, 6) if wrong == "mask" else None
    with pytest.raises(ValueError, match="one packed row"):
        packed_attention(module, query, key, key, mask, position_ids=positions)


def test_a_padding_mask_reaches_the_refusal():
    ids, _ = packed([6])
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="mask=True"):
        small_model(attn_implementation=attention.SDPA_PACKED)(input_ids=ids, attention_mask=mask, use_cache=False)


def reference_varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """varlen_attn's contract on a CPU: (T, heads, d), int32 borders, window (-1, 0) = causal."""
    assert torch.equal(cu_q, cu_k) and cu_q.dtype == torch.int32 and window_size == (-1, 0)
    borders = cu_q.tolist()
    assert max_q == max_k == max(b - a for a, b in zip(borders, borders[1:], strict=False))
    blocks = [torch.nn.functional.scaled_dot_product_attention(
        *(x[a:b].transpose(0, 1)[None] for x in (query, key, value)), is_causal=True, scale=scale,
        enable_gqa=enable_gqa)[0].transpose(0, 1) for a, b in zip(borders, borders[1:], strict=False)]
    return torch.cat(blocks)


def without_gqa(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
    return reference_varlen(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("kernel", [reference_varlen, without_gqa])
def test_varlen_hands_the_kernel_what_it_expects(monkeypatch, kernel):
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    ids, positions = packed(LENGTHS)
    found = []
    for name in (attention.SDPA_PACKED, attention.VARLEN):
        model = attention_layers_only(name)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        logits.log_softmax(-1).gather(-1, ids[0, :, None]).sum().backward()
        found.append((logits, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    (logits, grad), (other_logits, other_grad) = found
    assert (logits - other_logits).abs().max() < 1e-4 and (grad - other_grad).norm() < 1e-5 * grad.norm()


def test_installed_torch_takes_the_call():
    """The keywords that are passed exist in this torch, which CI's CPU cannot run."""
    parameters = inspect.signature(attention.varlen_attn).parameters
    assert {"scale", "window_size"} <= set(parameters)
    assert list(parameters)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["varlen", "flash-attn3"])
def test_backends_agree_on_the_gpu(name):
    if reason := attention.unavailable(name, "bfloat16"):
        pytest.skip(reason)
    ids, positions = (x.cuda() for x in packed([130, 1, 64, 77]))
    found = []
    for implementation in (attention.SDPA_PACKED, attention.NAMES[name]):
        model = small_model(std=0.05, layer_types=["full_attention"] * 3, num_hidden_layers=3, hidden_size=256,
                            attn_implementation=implementation).to("cuda", torch.bfloat16)
        found.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float().log_softmax(-1))
        found[-1].gather(-1, ids[0, :, None]).sum().backward()
        found.append(torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None]))
    assert (found[0] - found[2]).abs().mean() < 5e-3
    assert (found[1] - found[3]).norm() < 2e-2 * found[1].norm()


@pytest.mark.parametrize(("capability", "kernels", "dtype", "expected"), [
    (None, True, "bfloat16", "sdpa-packed"), ((9, 0), True, "bfloat16", "flash-attn3"),
    ((9, 0), False, "bfloat16", "varlen"), ((8, 0), True, "bfloat16", "varlen"), ((10, 0), True, "bfloat16", "varlen"),
    ((7, 5), True, "bfloat16", "sdpa-packed"), ((9, 0), True, "float32", "sdpa-packed")])
def test_auto_takes_what_runs_here_and_says_so(monkeypatch, capability, kernels, dtype, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda _: kernels or None)
    monkeypatch.setattr(attention.constants, "HF_HUB_OFFLINE", False)
    name, why = attention.choose("auto", dtype)
    assert name == attention.NAMES[expected] and why.startswith(f"attention: {expected}")
    assert attention.choose(expected, dtype) == (name, f"attention: {expected}, as set")
    for other in set(attention.NAMES) - {expected, "varlen", "sdpa-packed"}:
        with pytest.raises(SettingsError, match=rf"ATTENTION={other}: .* Set ATTENTION=auto"):
            attention.choose(other, dtype)


def test_offline_takes_the_hub_kernel_only_from_the_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(attention.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(attention.constants, "HF_HUB_CACHE", str(tmp_path))
    name, why = attention.choose("auto", "bfloat16")
    assert name == attention.VARLEN and "HF_HUB_OFFLINE is set" in why
    (tmp_path / "models--kernels-community--flash-attn3").mkdir()
    assert attention.choose("auto", "bfloat16")[0] == attention.FLASH_ATTN3


def test_old_torch_has_no_varlen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(attention, "varlen_attn", None)
    assert attention.choose("auto", "bfloat16")[0] == attention.SDPA_PACKED
    with pytest.raises(SettingsError, match="needs torch 2.10"):
        attention.choose("varlen", "bfloat16")
