"""The replacements in TRL: correct here, and loud when TRL is no longer what they replace."""

from __future__ import annotations

import pytest
import torch
import trl.trainer.utils as trl_utils
from lfm2_small import packed, small_model
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

from recipe import attention, group_trainer, rollout_worker, trl_cpu
from recipe.trl_shape import TrlShapeError

pytestmark = pytest.mark.usefixtures("trl_globals")


def test_what_is_applied_depends_on_the_machine(trl_globals):
    before = [getattr(*g) for g in trl_globals]
    assert trl_cpu.install(attention.FLASH_ATTN3, gpu=True) == []
    assert [getattr(*g) for g in trl_globals] == before
    assert trl_cpu.install(attention.SDPA_PACKED, gpu=False) == [
        "attention=sdpa-packed", "vllm_in_parent", "no_peak_flops", "torch_log_probs"]
    assert all(now is not then for now, then in zip([getattr(*g) for g in trl_globals], before, strict=True))


def test_log_probs_and_entropy_of_the_fused_head():
    trl_cpu.torch_log_probs()
    model, (ids, positions) = small_model(attn_implementation="sdpa"), packed([12])
    trained = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1]]).bool()
    logits = model(input_ids=ids, position_ids=positions).logits[:, :-1] / 0.7
    expected = logits.log_softmax(-1)
    trl_utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    out = model(input_ids=ids, position_ids=positions, labels=ids.masked_fill(~trained, -100), fused_lm_head=True)
    mask = trained[:, 1:]
    picked = expected.gather(-1, ids[:, 1:, None])[..., 0]
    assert torch.allclose(out.log_probs[mask], picked[mask], atol=1e-6) and out.log_probs[~mask].abs().sum() == 0
    entropy = -(expected.exp() * expected).sum(-1)
    assert torch.allclose(out.entropy[mask], entropy[mask], atol=1e-5)
    gradients = []
    for log_probs in (picked[mask], out.log_probs[mask]):
        model.zero_grad()
        log_probs.sum().backward(retain_graph=True)
        gradients.append(model.lm_head.weight.grad.clone())
    assert torch.allclose(*gradients, atol=1e-4) and gradients[0].abs().sum() > 0


def test_model_is_loaded_with_the_chosen_backend(monkeypatch):
    seen = {}

    def create_model_from_path(model_id, architecture=None, **kwargs):
        seen.update(kwargs, model_id=model_id)

    monkeypatch.setattr(trl_utils, "create_model_from_path", create_model_from_path)
    trl_cpu.use_attention(attention.SDPA_PACKED)
    async_grpo_trainer.create_model_from_path("m", attn_implementation=attention.FLASH_ATTN3, dtype="float32")
    assert seen == {"model_id": "m", "attn_implementation": attention.SDPA_PACKED, "dtype": "float32"}
    with pytest.raises(TrlShapeError, match="attn_implementation"):
        async_grpo_trainer.create_model_from_path("m", attn_implementation="sdpa")


def changed(*_, **__):
    """What a function of TRL may look like after a change."""


@pytest.mark.parametrize(("owner", "name", "apply"), [
    (async_rollout_worker.AsyncRolloutWorker, "__init__", trl_cpu.vllm_in_parent),
    (async_grpo_trainer.AsyncGRPOTrainer, "__init__", lambda: trl_cpu.use_attention("sdpa-packed")),
    (trl_utils, "create_model_from_path", lambda: trl_cpu.use_attention("sdpa-packed")),
    (trl_utils, "get_peak_flops_per_device", trl_cpu.no_peak_flops),
    (async_grpo_trainer.AsyncGRPOTrainer, "_log_step_metrics", trl_cpu.no_peak_flops),
    (trl_utils, "add_fused_lm_head", trl_cpu.torch_log_probs),
    (async_grpo_trainer.AsyncGRPOTrainer, "compute_loss", group_trainer.check_shape),
    (async_grpo_trainer.AsyncGRPOTrainer, "training_step", group_trainer.check_shape),
    (async_grpo_trainer.AsyncGRPOTrainer, "_sync_weight", group_trainer.check_shape),
    (async_grpo_trainer.AsyncGRPOTrainer, "_sync_weight_merged", group_trainer.check_shape),
    (async_grpo_trainer.AsyncGRPOTrainer, "get_train_dataloader", group_trainer.check_shape),
    (async_grpo_trainer.AsyncGRPOTrainer, "_save_checkpoint", group_trainer.check_shape),
    (async_grpo_trainer.DataCollatorForRollout, "torch_call", group_trainer.check_shape),
    (rollout_worker._HarnessRolloutLoop, "_run_session", rollout_worker.check_shape),
    (rollout_worker._HarnessRolloutLoop, "_score_group", rollout_worker.check_shape),
    (rollout_worker.AsyncRolloutWorker, "check_health", rollout_worker.check_shape),
    (rollout_worker.AsyncRolloutWorker, "start", rollout_worker.check_shape),
    (rollout_worker.AsyncRolloutWorker, "stop", rollout_worker.check_shape),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_changed_trl_stops_the_start(monkeypatch, owner, name, apply):
    apply()  # passes with TRL as it is
    monkeypatch.setattr(owner, name, changed)
    with pytest.raises(TrlShapeError, match=r"of trl 1\..*expected .*written against trl 1\.15\.0"):
        apply()


def test_a_global_that_is_gone_stops_the_start(monkeypatch, trl_globals):
    for module, name in trl_globals:
        with monkeypatch.context() as patch:
            patch.delattr(module, name)
            with pytest.raises((TrlShapeError, AttributeError)):
                trl_cpu.install(attention.SDPA_PACKED, gpu=False)
