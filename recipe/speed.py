"""What makes the trainer's step fast on a GPU; none of it changes what is computed, roundings within a layer aside.

At 12,000 tokens a rollout most of a step of LFM2.5-2.6B is not matrix products but passes over activations: norms,
gates, rotary embedding, the taps of the short convolutions, and scaling and adding of the adapters' outputs
(bench/train_step.py measures it). Compiled, these run as a few kernels a layer.
"""

from __future__ import annotations

import torch
from peft.tuners.lora import LoraLayer
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: torch.nn.Module) -> int:
    """Compiles every decoder layer for sequences of any length, within gradient checkpointing; returns their number.

    One layer at a time (regional compilation), because all layers of a kind share what was compiled.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def plain_inputs(model: torch.nn.Module) -> int:
    """No fp32 copy of what the adapters of `model` read, which autocast would make bf16 again: from then on `model`
    must run under autocast. Returns the number of adapted modules."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for module in adapted:
        module.cast_input_dtype_enabled = False
    return len(adapted)
