"""Packed attention: sequences of one row do not see each other."""

from __future__ import annotations

import pytest
import torch
from lfm2_small import packed, small_model

from recipe import attention
from recipe.attention import packed_attention, sequence_spans

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
    assert (row - alone).abs().max() < 1e-5
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


def test_choice_of_the_backend(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert attention.choose("auto") == attention.FLASH_ATTN3
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert attention.choose("auto") == attention.SDPA_PACKED
    assert attention.choose("flash-attn3") == attention.FLASH_ATTN3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention.choose("auto") == attention.SDPA_PACKED
