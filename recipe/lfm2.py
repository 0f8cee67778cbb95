"""What the trainer must know about the model: LoRA targets, tokenizer, end-of-turn ids; for LFM2 and LFM2.5 also what
stock code gets wrong about them.

Nothing here is a constant of one checkpoint: layers, widths and counts are read from the model's config.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from trl.chat_template_utils import lfm2_2_5_template

from recipe.chat_template import template_in_use
from recipe.config import Settings, SettingsError

# The projections of the short convolution. PEFT matches targets by suffix, so "out_proj" alone would also adapt
# conv.out_proj; they are left out because not every server can apply LoRA to them.
CONV_PROJECTIONS = ("conv.in_proj", "conv.out_proj")
END_OF_TURN = "<|im_end|>"


def load_config(settings: Settings) -> PretrainedConfig:
    return AutoConfig.from_pretrained(settings.model, **settings.hub_revision)


def is_lfm2(config: PretrainedConfig) -> bool:
    return config.model_type == "lfm2"


def lora_config(settings: Settings) -> LoraConfig:
    """PEFT's config of the adapter: fp32 matrices beside frozen projections of attention and MLP."""
    targets = list(settings.lora_targets)
    if settings.lora_conv:
        targets += [name for name in CONV_PROJECTIONS if name.split(".")[-1] not in targets]
    excluded = list(CONV_PROJECTIONS) if "out_proj" in targets and not settings.lora_conv else None
    return LoraConfig(r=settings.lora_r, lora_alpha=settings.lora_alpha, lora_dropout=settings.lora_dropout,
                      target_modules=targets, bias="none", task_type="CAUSAL_LM",
                      exclude_modules=excluded)


@dataclass(frozen=True)
class AdapterSummary:
    """Adapted modules by kind ("self_attn.q_proj": 10), and the adapter's size."""

    modules: dict[str, int]
    parameters: int

    @property
    def megabytes(self) -> float:
        """Size of adapter_model.safetensors, MB (1e6 bytes), in fp32."""
        return self.parameters * 4 / 1e6

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} x{count}" for name, count in sorted(self.modules.items()))
        return (f"LoRA on {sum(self.modules.values())} modules ({kinds}): {self.parameters:,} parameters, "
                f"{self.megabytes:.1f} MB")


def summarize_adapter(model: PeftModel) -> AdapterSummary:
    modules = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    kinds = Counter(".".join(name.split(".")[-2:]) for name in modules)
    return AdapterSummary(dict(kinds), sum(p.numel() for p in model.parameters() if p.requires_grad))


def plan_adapter(config: PretrainedConfig, lora: LoraConfig) -> AdapterSummary:
    """The adapter that `lora` gives on a model of this config, without loading a weight.

    Raises SettingsError when a target matches no module, which PEFT itself reports only if none of them does, or one
    whose update cannot be sent to the engine.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = sorted({name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
    try:
        adapted = get_peft_model(model, lora, low_cpu_mem_usage=True)
    except ValueError as err:  # nothing matches, or PEFT has no LoRA for it
        raise SettingsError(f"LORA_TARGETS={','.join(lora.target_modules)}: {err}") from err
    summary = summarize_adapter(adapted)
    missing = [t for t in lora.target_modules if not any(f".{kind}".endswith(f".{t}") for kind in summary.modules)]
    if missing:
        kind = ", ".join(config.architectures or [config.model_type])
        raise SettingsError(f"LORA_TARGETS names {', '.join(missing)}, which {kind} does not have or which is "
                            f"excluded; its linear layers are {', '.join(linear)}")
    head = adapted.get_output_embeddings()
    wrong = [name for name, m in adapted.named_modules()
             if isinstance(m, LoraLayer) and (m is head or not isinstance(m, LoraLinear))]
    if wrong:
        names = ", ".join(name.removeprefix("base_model.model.") for name in wrong)
        raise SettingsError(f"LORA_TARGETS adapts {names}, whose update would not reach the engine: only linear layers "
                            f"below the head can be adapted, that is {', '.join(n for n in linear if n != 'lm_head')}")
    return summary


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """The tokenizer, that of LFM2.5 with its response template.

    TRL finds a template only where the chat template is byte-identical to one that it ships, so LFM2.5's is set here.
    """
    tokenizer = AutoTokenizer.from_pretrained(settings.model, **settings.hub_revision)
    if is_lfm2(load_config(settings)):
        tokenizer.response_template = lfm2_2_5_template
    tokenizer.chat_template = template_in_use(tokenizer.chat_template or "", settings.thinking)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def eos_token_ids(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: those of the generation config, of the tokenizer, and <|im_end|>."""
    try:
        declared = GenerationConfig.from_pretrained(settings.model, **settings.hub_revision).eos_token_id
    except OSError:  # a checkpoint without generation_config.json
        declared = None
    ids = declared if isinstance(declared, list) else [declared]
    ids += [tokenizer.eos_token_id, tokenizer.get_vocab().get(END_OF_TURN)]
    return sorted({i for i in ids if i is not None})
