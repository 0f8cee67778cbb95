"""LORA=0 on a small Qwen3: all weights move, the engine holds exactly what is trained, and a model is what remains."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from lfm2_small import SPECIAL, VOCABULARY, local_settings, save_small_model
from small_engine import SmallEngine, SmallSessions
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import chat_template_utils
from trl.chat_template_utils import add_response_schema

import train_lora
from recipe import lfm2
from recipe.checkpoints import newest_checkpoint
from recipe.config import QWEN_TARGETS, REPO
from recipe.isolation_check import LeakError


def save_small_qwen(folder: Path) -> Qwen3ForCausalLM:
    """A Qwen3 of a few thousand parameters with the chat template of the 2507 Instruct models."""
    save_small_model(folder)  # its tokenizer
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0,
        bos_token_id=None, eos_token_id=7))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    template = chat_template_utils.qwen3_instruct_2507_chat_template
    (folder / "chat_template.jinja").write_text(template)
    return model.eval()


def test_training_all_weights_then_resume(tmp_path, monkeypatch, capfd, trl_globals):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO / "tests/trainer"), os.environ.get("PYTHONPATH", "")]))
    settings = local_settings(tmp_path, lora=False, recipe="deepcoder", per_device_batch=3, fork_threshold=1024,
                              save_steps=2, max_steps=3)
    base = save_small_qwen(tmp_path / "model-0")
    settings = dataclasses.replace(settings, model=str(tmp_path / "model-0"))
    # Group 2 has rewards, but no row: none of its turns carries loss. Group 1 forks by less than FORK_THRESHOLD.
    fates = {1: ["forks", "runs"], 2: ["says nothing trained"], 3: ["says nothing trained", "runs", "runs", "runs"]}
    with SmallEngine(base) as engine:
        settings = dataclasses.replace(settings, policy_port=engine.server.server_port, print_completions=1)
        sessions = SmallSessions(engine.url, tasks=4, fates=fates, log=tmp_path / "sessions", in_order=True)
        assert train_lora.train(settings, "auto", sessions) == 0
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        final, last = model.state_dict(), engine.served[-1]
        assert newest_checkpoint(tmp_path / "checkpoints").name == "checkpoint-3"
        assert train_lora.train(dataclasses.replace(settings, max_steps=4), "auto", sessions) == 0

    out = capfd.readouterr().out
    assert "all weights are trained" in out and "packed sequences: influence on each other 0.0e+00 nats" in out
    assert f"model saved to {tmp_path / 'model'}" in out and not (tmp_path / "adapter").exists()
    # By the worker, for each group; the last one may be cut off by its end.
    printed = [panel.partition("╰")[0] for panel in out.split("─ Step ")[1:] if "╰" in panel]
    assert len(printed) >= 4 and "ASSISTANT" in printed[0]
    assert [panel.count("USER") for panel in printed] == [1] * len(printed), "as many as PRINT_COMPLETIONS says"
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [{row["group"] for row in step["group_rows"]} for step in steps[:3]] == [{0}, {1}, {3}]
    assert steps[2]["skipped_groups"]["no contrast"] == 1, "group 2 is graded and has no row"
    assert all(step["ungraded_rollouts"] == 0 and step["rollouts"] == 4 for step in steps)
    assert [step["rows"] for step in steps[:3]] == [4, 4, 3], "one rollout of group 3 has a reward and no row"
    assert len(steps[2]["rewards"]) == 4
    fresh = [row["ratio"] for step in steps for row in step["group_rows"] if row["fresh"]]
    assert fresh and all(abs(ratio - 1) < 1e-4 for ratio in fresh), fresh

    start = {name: tensor for name, tensor in base.state_dict().items() if name != "lm_head.weight"}
    assert engine.served[0].keys() == start.keys() == last.keys(), "the tied head is sent once, as the embedding"
    assert all(torch.equal(engine.served[0][name], start[name]) for name in start)
    assert all(not torch.equal(last[name], start[name]) for name in start), "every weight is trained"
    assert all(torch.equal(last[name], final[name]) for name in last), "the last sync is the saved model"
    assert any(abs(step["trl"]["grad_norm"]) > 0 for step in steps)
    assert steps[3]["step"] == 4 and "resuming from" in out


def test_rows_of_sequences_that_see_each_other_are_not_trained_in_any_model(tmp_path, monkeypatch, trl_globals):
    """Stands for a hybrid model that nothing keeps apart: attention over the whole row."""
    settings = local_settings(tmp_path, lora=False, per_device_batch=4, save_steps=0)
    base = save_small_qwen(tmp_path / "qwen")
    monkeypatch.setattr("recipe.attention.sequence_spans", lambda positions: [(0, positions.numel())])
    with SmallEngine(base) as engine:
        settings = dataclasses.replace(settings, model=str(tmp_path / "qwen"), policy_port=engine.server.server_port)
        sessions = SmallSessions(engine.url, tasks=4, fates={}, log=tmp_path / "sessions")
        with pytest.raises(LeakError, match="influence .* PER_DEVICE_BATCH=1 put one sequence in a row"):
            train_lora.train(settings, "never", sessions)
        assert not engine.served and not (tmp_path / "sessions").exists(), "nothing was started"


def test_settings_of_other_models_are_not_lfm2_s(tmp_path):
    settings = local_settings(tmp_path, lora_targets=QWEN_TARGETS)
    save_small_qwen(tmp_path / "qwen")
    settings = dataclasses.replace(settings, model=str(tmp_path / "qwen"))
    config = lfm2.load_config(settings)
    tokenizer = lfm2.load_tokenizer(settings)
    assert not lfm2.is_lfm2(config) and getattr(tokenizer, "response_template", None) is None
    # TRL knows this template by itself
    assert add_response_schema(tokenizer).response_template == chat_template_utils.qwen3_template
    assert lfm2.eos_token_ids(settings, AutoTokenizer.from_pretrained(settings.model)) == [7]
    plan = lfm2.plan_adapter(config, lfm2.lora_config(settings))
    assert set(plan.modules) == {f"self_attn.{n}" for n in QWEN_TARGETS[:4]} | {f"mlp.{n}" for n in QWEN_TARGETS[4:]}
    assert SPECIAL[7] == lfm2.END_OF_TURN
