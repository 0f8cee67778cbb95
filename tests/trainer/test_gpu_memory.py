"""The memory plan: its formula against what was measured, and that it says what does not fit."""

from __future__ import annotations

import pytest

from recipe import gpu_memory
from recipe.config import Settings, SettingsError
from recipe.gpu_memory import GIB, Shape, kept_tokens, plans, shape_of

LFM = Shape(parameters=2_556_677_376, adapter=41_123_840, layers=30, hidden=2048, intermediate=10752,
            attention_layers=10, kv_width=512)
H200 = 143_771 * 2**20


def trainer(tokens: int, **settings: str):
    return plans(Settings.load({"TOKEN_BUDGET": str(tokens), "MAX_MODEL_LEN": "8192"} | settings), LFM, H200)[-1].parts


@pytest.mark.parametrize("tokens, gib", [(48_000, 23), (96_000, 41), (160_000, 65)])
def test_formula_gives_what_was_measured(tokens, gib):
    parts = trainer(tokens)
    measured = parts["trainer's weights"] + parts["adapter and optimizer"] + parts["activations"]
    assert measured / GIB == pytest.approx(gib, rel=0.03)


def test_the_defaults_fit_on_one_h200_and_on_two():
    (one,) = plans(Settings.load({"GPUS": "1"}), LFM, H200)
    engine, trains = plans(Settings.load({}), LFM, H200)
    assert one.free > 20 * GIB and engine.free > 5 * GIB and trains.free > 80 * GIB
    assert "policy server 56" in str(one) and "activations 15" in str(one)


def test_rows_that_fit_keep_their_activations():
    """A row of 17,203 tokens took 53.4 GiB in all without checkpointing (bench/train_step.py, H200)."""
    one, two = (kept_tokens(Settings.load({"GPUS": gpus}), LFM, H200) for gpus in "12")
    assert 20_000 < one < 25_000 and 36_000 < two < 42_000
    parts = trainer(17_203)
    free = H200 - parts["trainer's weights"] - parts["adapter and optimizer"] - 53.4 * GIB
    assert kept_tokens(Settings.load({}), LFM, int(H200 - free)) < 17_203, "what was measured has no room to spare"
    assert kept_tokens(Settings.load({"COMPILE": "off"}), LFM, H200) < 0.7 * two
    assert kept_tokens(Settings.load({"GRADIENT_CHECKPOINTING": "on"}), LFM, H200) == 0
    assert kept_tokens(Settings.load({"GRADIENT_CHECKPOINTING": "off"}), LFM, H200) > 10**9


def test_all_weights_of_the_second_recipe_need_16_bytes_each_and_fit_on_two_h200():
    qwen = Shape(parameters=4_022_468_096, adapter=0, layers=36, hidden=2560, intermediate=9728, attention_layers=36,
                 kv_width=1024)
    engine, trains = plans(Settings.load({"RECIPE": "deepcoder"}), qwen, H200)
    assert trains.parts["trainer's weights"] + trains.parts["adapter and optimizer"] == 16 * qwen.parameters
    assert engine.parts["sync buffer"] == trains.parts["sync buffer"] == 4 * qwen.parameters
    assert trains.free > 20 * GIB
    with pytest.raises(SettingsError, match="GPU of the trainer lacks"):
        plans(Settings.load({"RECIPE": "deepcoder", "GPU_MEMORY_UTILIZATION": "0.7"}), qwen, 80 * GIB)


@pytest.mark.parametrize("settings, said", [
    ({"GPUS": "1", "GPU_MEMORY_UTILIZATION": "0.85"}, "GPU of both lacks .*lower GPU_MEMORY_UTILIZATION to 0.7"),
    ({"GPUS": "1", "TOKEN_BUDGET": "400000"}, "GPU of both lacks .*lower TOKEN_BUDGET=400000.*or set GPUS=2"),
    ({"TOKEN_BUDGET": "400000"}, "GPU of the trainer lacks .*lower TOKEN_BUDGET=400000"),
    ({"GPU_MEMORY_UTILIZATION": "0.97"}, "GPU of the policy server lacks .*lower GPU_MEMORY_UTILIZATION"),
    ({"GPU_MEMORY_UTILIZATION": "0.06"}, "leave .* for its cache.*raise GPU_MEMORY_UTILIZATION to 0.0")])
def test_what_does_not_fit_is_named_with_the_setting(settings, said):
    with pytest.raises(SettingsError, match=said):
        plans(Settings.load(settings), LFM, H200)


def test_attention_that_does_not_run_here_is_told_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, value in {"PRESET": "local", "ATTENTION": "varlen"}.items():
        monkeypatch.setenv(name, value)
    assert gpu_memory.main([]) == 64
    assert "ATTENTION=varlen: there is no GPU. Set ATTENTION=auto" in capsys.readouterr().err


def test_shape_comes_from_the_config():
    assert shape_of(Settings.load({}, preset="local")) == Shape(998_656, 241_664, 5, 128, 256, 2, 64)


def test_settings_of_one_gpu():
    assert Settings.load({}).engine_memory_share == 0.85 and Settings.load({"GPUS": "1"}).engine_memory_share == 0.4
    assert Settings.load({"GPUS": "1", "GPU_MEMORY_UTILIZATION": "0.5"}).engine_memory_share == 0.5
    with pytest.raises(SettingsError, match="WEIGHT_SYNC=stock is NCCL.*GPUS=2"):
        Settings.load({"GPUS": "1", "WEIGHT_SYNC": "stock"})
    with pytest.raises(SettingsError, match="GPU_MEMORY_UTILIZATION=0.01"):
        Settings.load({"GPU_MEMORY_UTILIZATION": "0.01"})
