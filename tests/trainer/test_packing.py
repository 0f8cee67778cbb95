"""Packing in the trainer: the importance ratio stays 1 and the gradient is that of the group, however it is cut."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lfm2_small import local_settings, small_model
from small_engine import SmallEngine, SmallSessions
from trl.experimental.async_grpo import AsyncGRPOConfig

import train_lora
from recipe import attention, groups, lfm2, short_conv, trl_cpu
from recipe.group_trainer import GroupGRPOTrainer
from recipe.groups import GroupCollator, pack
from recipe.isolation_check import Isolation, LeakError
from recipe.rollout_worker import DRIFT, ROW

REPO = Path(__file__).parents[2]
LENGTHS = [(31, 12), (18, 17), (9, 1), (40, 22), (6, 5), (25, 3), (14, 7), (22, 9)]  # tokens, of which trained


def packed_training(run: Path, monkeypatch) -> list[dict]:
    """Three steps with rows of up to 64 tokens, which hold three to four sequences each; the lines of metrics.jsonl."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO / "tests/trainer"), os.environ.get("PYTHONPATH", "")]))
    settings = local_settings(run, token_budget=64)
    with SmallEngine(small_model()) as engine:
        settings = dataclasses.replace(settings, policy_port=engine.server.server_port)
        sessions = SmallSessions(engine.url, tasks=3, fates={0: ["forks", "runs"]}, log=run / "sessions")
        assert train_lora.train(settings, "never", sessions) == 0
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def deviations(steps: list[dict]) -> list[float]:
    """How far the mean ratio of each row that the trained weights sampled is from 1."""
    return [abs(row["ratio"] - 1) for step in steps for row in step["group_rows"] if row["fresh"]]


def test_packed_rows_have_ratio_one(tmp_path, monkeypatch, capsys, trl_globals):
    steps = packed_training(tmp_path, monkeypatch)
    found = deviations(steps)
    assert len(found) >= 4 and max(found) < 1e-4, found
    out = capsys.readouterr().out
    assert "keep packed sequences apart: 2" in out and "influence on each other 0.0e+00" in out


def test_the_same_run_without_the_isolation(tmp_path, monkeypatch, trl_globals):
    monkeypatch.setattr(short_conv, "isolate", lambda model: 0)
    with pytest.raises(LeakError, match="influence"):
        packed_training(tmp_path / "checked", monkeypatch)
    monkeypatch.setattr(Isolation, "require", lambda self: None)
    found = deviations(packed_training(tmp_path / "unchecked", monkeypatch))
    assert max(found) > 1e-2, found


@pytest.fixture
def trainer(tmp_path, trl_globals):
    """The trainer on the small model with an adapter that acts; nothing runs beside it."""
    settings = local_settings(tmp_path)
    trl_cpu.install(attention.SDPA_PACKED, gpu=False)
    arguments = train_lora.trainer_arguments(settings, gpu=False) | {"report_to": []}
    made = GroupGRPOTrainer(
        model=settings.model, args=AsyncGRPOConfig(**arguments), processing_class=lfm2.load_tokenizer(settings),
        train_dataset=[{"prompt": "none"}], peft_config=lfm2.lora_config(settings),
        rollout_worker=SimpleNamespace(rollout_buffer=queue.Queue()), weight_transfer=SimpleNamespace())
    assert short_conv.isolate(made.model) == 2
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return made


def group_of_eight() -> list[dict]:
    """Eight sequences of one group with log-probs that clip some ratios, and advantages of both signs."""
    generator = torch.Generator().manual_seed(6)
    group = []
    for i, (tokens, trained) in enumerate(LENGTHS):
        metrics = {"reward": float(i % 2), ROW + "rollout": float(i), ROW + "tool_calls": 1.0, ROW + "rows": 8.0,
                   ROW + "graded": 8.0, ROW + "rollouts": 8.0, ROW + "first_call": float("nan"),
                   ROW + "last_call": float("nan"), **{ROW + name: 0.0 for name in DRIFT},
                   ROW + "version": 0.0, ROW + "one_version": 1.0}
        group.append({
            "input_ids": torch.randint(8, 64, (tokens,), generator=generator).tolist(),
            "completion_mask": [0] * (tokens - trained) + [1] * trained,
            "old_log_probs": (torch.rand(tokens, generator=generator) - 5).tolist(), "advantage": i - 3.4,
            "group_id": 0, "metrics": metrics, "model_version": 0})
    return group


def permuted(items: list, generator: torch.Generator) -> list:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]


def gradient(trainer: GroupGRPOTrainer, group: list[dict], token_budget: int, shuffle: bool
             ) -> tuple[int, torch.Tensor, float]:
    """Rows, gradient of the adapter and loss of one training step on `group`; shuffled between and within rows."""
    order = torch.Generator().manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        if shuffle:
            patch.setattr(groups, "pack", lambda *args: permuted([permuted(r, order) for r in pack(*args)], order))
        batch = GroupCollator(pad_token_id=0, token_budget=token_budget).torch_call([group])
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(trainer.model, batch)
    found = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    return len(batch["rows"]), found.clone(), float(loss)


def test_gradient_of_a_group_is_the_same_however_it_is_cut(trainer):
    """One row, two rows, eight micro-batches, shuffled rows; against the token mean written out by hand."""
    group = group_of_eight()
    cases = {"one row": (group, 1000, False), "two rows": (group, 90, False), "eight micro-batches": (group, 0, False),
             "shuffled, one row": (group, 1000, True), "shuffled, three rows": (group, 60, True)}
    found = {name: gradient(trainer, *case) for name, case in cases.items()}
    assert [rows for rows, _, _ in found.values()] == [1, 2, 8, 1, 3]

    trainer.model.zero_grad()
    total = sum(trained for _, trained in LENGTHS)
    loss = torch.zeros(())
    for sample in group:
        ids = torch.tensor([sample["input_ids"]])
        logits = trainer.model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
        log_probs = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        ratio = (log_probs - torch.tensor(sample["old_log_probs"][1:])).exp()
        low, high = 1 - trainer.epsilon_low, 1 + trainer.epsilon_high
        gain = torch.minimum(ratio * sample["advantage"], ratio.clamp(low, high) * sample["advantage"])
        loss = loss - gain[torch.tensor(sample["completion_mask"][1:]).bool()].sum() / total
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    assert expected.norm() > 1e-3
    for name, (_, grad, value) in found.items():
        assert (grad - expected).norm() < 1e-5 * expected.norm(), name
        assert value == pytest.approx(float(loss.detach()), rel=1e-5), name
