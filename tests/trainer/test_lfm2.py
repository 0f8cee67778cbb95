"""LoRA targets and tokenizer: what is adapted follows from the model's config, never from a constant."""

from __future__ import annotations

import dataclasses

import pytest
from lfm2_small import save_small_model, small_config
from peft import PeftModel, get_peft_model
from transformers import Lfm2Config, Lfm2ForCausalLM

from recipe.config import Settings, SettingsError
from recipe.lfm2 import eos_token_ids, load_tokenizer, lora_config, plan_adapter, summarize_adapter

JOB = Settings.load({})


def lfm2_2b6(conv: int, attention: int) -> Lfm2Config:
    """The 2.6B shape with that many layers of each kind."""
    return Lfm2Config(vocab_size=65536, hidden_size=2048, intermediate_size=10752, num_hidden_layers=conv + attention,
                      num_attention_heads=32, num_key_value_heads=8, conv_L_cache=3, block_auto_adjust_ff_dim=False,
                      layer_types=["conv"] * conv + ["full_attention"] * attention)


@pytest.mark.parametrize(("conv", "attention", "parameters"), [(20, 10, 41_123_840), (22, 8, 40_271_872)])
def test_adapter_of_both_published_shapes(conv, attention, parameters):
    plan = plan_adapter(lfm2_2b6(conv, attention), lora_config(JOB))
    assert plan.parameters == parameters
    layers = conv + attention
    assert plan.modules == {f"self_attn.{name}": attention for name in ("q_proj", "k_proj", "v_proj", "out_proj")} | {
        f"feed_forward.{name}": layers for name in ("w1", "w2", "w3")}


def test_short_convolutions_are_adapted_by_one_setting():
    plan = plan_adapter(lfm2_2b6(20, 10), lora_config(dataclasses.replace(JOB, lora_conv=True)))
    assert plan.modules["conv.in_proj"] == plan.modules["conv.out_proj"] == 20
    in_proj, out_proj = 32 * (2048 + 3 * 2048), 32 * (2048 + 2048)
    assert plan.parameters == 41_123_840 + 20 * (in_proj + out_proj)


def test_without_the_exclusion_peft_would_adapt_conv_out_proj():
    config = lora_config(JOB)
    config.exclude_modules = None
    assert "conv.out_proj" in plan_adapter(small_config(), config).modules


def test_unknown_target_is_named():
    with pytest.raises(SettingsError, match=r"gate_proj.*w1, w2, w3"):
        plan_adapter(small_config(), lora_config(dataclasses.replace(JOB, lora_targets=("q_proj", "gate_proj"))))


@pytest.mark.parametrize(("targets", "why"), [
    (("q_proj", "embed_tokens"), "adapts model.embed_tokens, whose update would not reach .* q_proj, v_proj, w1"),
    (("q_proj", "conv.conv"), "adapts model.layers.0.conv.conv, model.layers.2.conv.conv"),
    (("lm_head",), "adapts lm_head"), (("operator_norm",), "LORA_TARGETS=operator_norm: .* not supported"),
    (("nothing",), "LORA_TARGETS=nothing: Target modules .* not found")])
def test_targets_that_the_engine_would_never_see_are_refused(targets, why):
    with pytest.raises(SettingsError, match=why):
        plan_adapter(small_config(), lora_config(dataclasses.replace(JOB, lora_targets=targets)))


def test_summary_shows_modules_parameters_and_size():
    text = str(plan_adapter(lfm2_2b6(20, 10), lora_config(JOB)))
    assert "self_attn.q_proj x10" in text and "41,123,840 parameters" in text and "164.5 MB" in text


def test_saved_adapter_loads_in_peft_and_has_the_names_vllm_expects(tmp_path):
    from safetensors import safe_open
    model = get_peft_model(Lfm2ForCausalLM(small_config()), lora_config(JOB))
    model.save_pretrained(tmp_path)
    assert summarize_adapter(PeftModel.from_pretrained(Lfm2ForCausalLM(small_config()), tmp_path, is_trainable=True)
                             ) == summarize_adapter(model)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "base_model.model.model.layers.1.self_attn.out_proj.lora_A.weight" in names
    assert "base_model.model.model.layers.0.feed_forward.w2.lora_B.weight" in names
    assert not any(".conv." in name for name in names)


def test_tokenizer_gets_the_response_template_and_all_end_ids(tmp_path):
    settings = dataclasses.replace(JOB, model=str(save_small_model(tmp_path)))
    tokenizer = load_tokenizer(settings)
    assert tokenizer.response_template["start_anchor"] == "<|im_start|>assistant\n"
    assert eos_token_ids(settings, tokenizer) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert eos_token_ids(settings, tokenizer) == [2, 7]
    (tmp_path / "generation_config.json").unlink()
    assert eos_token_ids(settings, tokenizer) == [7]
