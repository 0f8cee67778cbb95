"""What TRL 1.15.0 assumes about the machine, replaced where this machine is another one.

TRL's AsyncGRPOTrainer is written for a Hopper GPU with vLLM installed beside it. On a machine without a GPU four of its
module globals are in the way; each is replaced by one function here, after a look that TRL still is what we replace:

1. vllm_in_parent    the rollout worker asks for an installed vLLM, although only the server needs it
2. attention         flash-attn3 is hard-coded; the model is loaded with the backend of ATTENTION instead
3. no_peak_flops     the peak FLOP/s of "the GPU" are looked up for the utilisation metric
4. torch_log_probs   the fused head's log-probs are a Triton kernel; plain PyTorch on the trained tokens instead

`install(backend, gpu)` does what the machine needs; on a GPU with flash-attn3 that is nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import trl.trainer.utils as trl_utils
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker

from recipe import attention
from recipe.trl_shape import expect_parameters, expect_source, mismatch, replace_global


def install(backend: str, gpu: bool) -> list[str]:
    """Applies the replacements for attention `backend` on a machine with or without a GPU; returns their names."""
    done = []
    if backend != attention.FLASH_ATTN3:
        use_attention(backend)
        done.append(f"attention={backend}")
    if not gpu:
        for shim in (vllm_in_parent, no_peak_flops, torch_log_probs):
            shim()
            done.append(shim.__name__)
    return done


def vllm_in_parent() -> None:
    """The worker's parent never imports vLLM: the check of its presence is answered with yes."""
    expect_source(async_rollout_worker.AsyncRolloutWorker.__init__, "if not is_vllm_available(): raise ImportError")
    replace_global(async_rollout_worker, "is_vllm_available", lambda *_, **__: True)


def use_attention(backend: str) -> None:
    """The policy is loaded with attention `backend` instead of the hard-coded kernel."""
    attention.register()
    expect_source(async_grpo_trainer.AsyncGRPOTrainer.__init__,
                  f'create_model_from_path(model, device_map=None, attn_implementation="{attention.FLASH_ATTN3}",')
    expect_parameters(trl_utils.create_model_from_path, ("model_id", "architecture", "kwargs"))

    def create_model(model_id: str, **kwargs: Any) -> torch.nn.Module:
        if kwargs.get("attn_implementation") != attention.FLASH_ATTN3:
            raise mismatch("AsyncGRPOTrainer", f"attn_implementation={attention.FLASH_ATTN3}",
                           str(kwargs.get("attn_implementation")))
        return trl_utils.create_model_from_path(model_id, **{**kwargs, "attn_implementation": backend})

    replace_global(async_grpo_trainer, "create_model_from_path", create_model)


def no_peak_flops() -> None:
    """Without a GPU there are no peak FLOP/s; None switches TRL's utilisation metric off."""
    expect_parameters(trl_utils.get_peak_flops_per_device, ("accelerator", "dtype"))
    expect_source(async_grpo_trainer.AsyncGRPOTrainer._log_step_metrics, "if self._peak_flops_per_device is not None:")
    replace_global(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)


class TorchLogProbs:
    """Stands where TRL calls its Triton autograd function; PyTorch differentiates it by itself."""

    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
              temperature: float, chunk_size: int, softcap: float | None, logit_scale: float,
              outputs: tuple[str, ...]) -> tuple[torch.Tensor | None, ...]:
        """Log-prob of each target and entropy of its distribution, (N,) each, for `hidden` (N, d), `weight` (V, d).

        Only the trained tokens arrive here, so no logits are computed for prompts and tool results.
        """
        if softcap is not None or set(outputs) - {"log_probs", "entropy"}:
            raise mismatch("the fused LM head", "no soft cap and outputs log_probs, entropy", f"{softcap}, {outputs}")
        logits = F.linear(hidden, weight, bias).float() * (logit_scale / temperature)
        log_probs = logits.log_softmax(dim=-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return log_probs.gather(-1, targets[:, None])[:, 0], entropy, None, None, None


def torch_log_probs() -> None:
    """The fused head computes its log-probs in PyTorch."""
    expect_source(trl_utils.add_fused_lm_head,
                  "_ChunkedLogProbFunction.apply(hidden_states[mask], weight, bias, labels[mask], temperature, "
                  "_CHUNKED_LOGPROB_CHUNK_SIZE, final_logit_softcapping, logit_scale, outputs,)",
                  "log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = (")
    replace_global(trl_utils, "_ChunkedLogProbFunction", TorchLogProbs)
