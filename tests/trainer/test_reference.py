"""Three steps of train_lora.py against GRPO and AdamW written out by hand: what the engine gets after each is the same.

The reference shares nothing with the trainer but the sampled rows: one sequence at a time through the stock model in
float64, the adapter as W + alpha / r * B @ A, advantages from the rewards, the mean over the group's trained tokens,
the clipped ratio, the clipped gradient, a constant learning rate.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lfm2_small import local_settings, small_model
from small_engine import SmallEngine, SmallSessions
from torch.func import functional_call
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import train_lora
from recipe.config import REPO, Settings
from recipe.group_trainer import GroupGRPOTrainer
from recipe.rollout_worker import ROW

# AdamW's first move is the sign of the gradient, so with the usual epsilon of 1e-8 the rounding of float32 would decide
# it where the gradient is about zero; with this one the move is continuous in the gradient.
CLIP, MAX_NORM, BETAS, EPSILON = 0.2, 1.0, (0.9, 0.999), 1e-3
# Forks, an ungraded rollout, one whose turns carry no loss, and one that ends under newer weights than it began with.
FATES = {0: ["forks", "runs", "ungraded", "runs"], 1: ["runs", "says nothing trained", "forks", "runs"],
         2: ["runs", "spans 3"]}
Tensors = dict[str, torch.Tensor]


def recorded(run: Path, monkeypatch, lora: bool) -> tuple[Settings, list[list[RolloutSample]], Tensors, list[Tensors]]:
    """The groups of three steps, what is trained as it was before the first, and the engine's weights after each."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO / "tests/trainer"), os.environ.get("PYTHONPATH", "")]))
    groups, start = [], {}
    real = GroupGRPOTrainer.training_step

    def watched(self, model, inputs, num_items_in_batch=None):
        if not start:
            start.update({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})
        groups.append(self._rollout_dataset.last_group)
        return real(self, model, inputs, num_items_in_batch)

    arguments = train_lora.trainer_arguments
    monkeypatch.setattr(GroupGRPOTrainer, "training_step", watched)
    monkeypatch.setattr(train_lora, "trainer_arguments", lambda *of: arguments(*of) | {"adam_epsilon": EPSILON})
    settings = local_settings(run, lora=lora, token_budget=64, lora_r=8, lora_alpha=24)
    with SmallEngine(small_model()) as engine:
        settings = dataclasses.replace(settings, policy_port=engine.server.server_port, run_dir=str(run / "run"))
        settings.run_path.mkdir()
        sessions = SmallSessions(engine.url, 3, FATES, run / "sessions", in_order=True)
        assert train_lora.train(settings, "never", sessions) == 0
        return settings, groups, start, engine.served


def merged(base: Tensors, trained: Tensors, scale: float) -> Tensors:
    """All weights of the policy, by the names of the base."""
    if not any("lora_" in name for name in trained):
        return base | trained
    out = dict(base)
    for name, b in trained.items():
        if "lora_B" in name:
            stem = name.removeprefix("base_model.model.").split(".lora_B")[0] + ".weight"
            out[stem] = base[stem] + scale * b @ trained[name.replace("lora_B", "lora_A")]
    return out


def loss_of(group: list[RolloutSample], model: torch.nn.Module, weights: Tensors) -> torch.Tensor:
    rewards = {row.metrics[ROW + "rollout"]: row.metrics["reward"] for row in group}
    graded = [*rewards.values(), *group[0].metrics[ROW + "rowless"]]
    mean = sum(graded) / len(graded)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in graded) / len(graded))
    gains = []
    for row in group:
        ids = torch.tensor([row.input_ids])
        logits = functional_call(model, weights, kwargs={"input_ids": ids, "use_cache": False}).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        ratio = (log_probs - torch.tensor(row.old_log_probs[1:])).exp()
        advantage = (row.metrics["reward"] - mean) / deviation
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        gains.append(gain[torch.tensor(row.completion_mask[1:]).bool()])
    return -torch.cat(gains).mean()


def reference(groups: list[list[RolloutSample]], start: Tensors, scale: float, rate: float) -> Iterator[Tensors]:
    """The policy's weights after each step."""
    model = small_model().double()
    base = {name: p.detach() for name, p in model.named_parameters()}
    trained = {name: p.double().requires_grad_() for name, p in start.items()}
    first, second = ({name: torch.zeros_like(p) for name, p in trained.items()} for _ in range(2))
    for step, group in enumerate(groups, 1):
        loss = loss_of(group, model, merged(base, trained, scale))
        gradients = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        for name, gradient in gradients.items():
            gradient = gradient * min(1.0, MAX_NORM / (norm.item() + 1e-6))
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * gradient
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * gradient**2
            move = (first[name] / (1 - BETAS[0]**step)) / ((second[name] / (1 - BETAS[1]**step)).sqrt() + EPSILON)
            trained[name] = (trained[name] - rate * move).detach().requires_grad_()
        yield {name: tensor.detach() for name, tensor in merged(base, trained, scale).items()}


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "all weights"])
def test_steps_are_those_of_grpo(tmp_path, monkeypatch, trl_globals, lora):
    settings, groups, start, served = recorded(tmp_path, monkeypatch, lora)
    assert [len(group) for group in groups] == [4, 4, 4] and len(served) == 4
    assert any("lora_" in name for name in start) == lora
    assert groups[1][0].metrics[ROW + "rowless"] and max(len(r.input_ids) for g in groups for r in g) < 64
    scale = settings.lora_alpha / settings.lora_r
    for before, after, expected in zip(served[:-1], served[1:], reference(groups, start, scale, settings.learning_rate),
                                       strict=True):
        moved = [name for name in after if not torch.equal(after[name], before[name])]
        assert len(moved) == (2 * 4 + 4 * 3 if lora else len(after))
        error, size = (math.sqrt(sum(float((a[name].double() - b[name]).square().sum()) for name in moved))
                       for a, b in ((after, expected), (before, expected)))
        assert error < 1e-4 * size, (error, size)
