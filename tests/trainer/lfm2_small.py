"""A random LFM2-shaped model of a few thousand parameters, and what the trainer's tests share around it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerFast

from recipe.config import Settings

SPECIAL = {0: "<|pad|>", 1: "<|startoftext|>", 2: "<|endoftext|>", 6: "<|im_start|>", 7: "<|im_end|>"}
VOCABULARY = 64


def small_config(**changes) -> Lfm2Config:
    layers = ["conv", "full_attention", "conv", "full_attention"]
    return Lfm2Config(**{**dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, conv_L_cache=3, layer_types=layers, block_auto_adjust_ff_dim=False, tie_embedding=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=7), **changes})


def small_model(std: float = 0.15, seed: int = 0, **changes) -> Lfm2ForCausalLM:
    """Weights large enough that a wrong mask or a lost update shows."""
    torch.manual_seed(seed)
    model = Lfm2ForCausalLM(small_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
    model.tie_weights()
    return model.eval()


def save_small_model(folder: Path) -> Path:
    """The model with a word-level tokenizer, as from_pretrained loads both."""
    small_model().save_pretrained(folder)
    words = {SPECIAL.get(i, f"w{i}"): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w63"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1],
                            eos_token=SPECIAL[7], chat_template="{{ messages }}").save_pretrained(folder)
    return folder


def packed(lengths: list[int], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random input_ids (1, T) and the position_ids of that many packed sequences."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, VOCABULARY, (1, sum(lengths)), generator=generator)
    return ids, torch.cat([torch.arange(n) for n in lengths])[None]


def local_settings(run_dir: Path, **changes) -> Settings:
    """The local preset with the small model, four rollouts a group and three steps."""
    base = Settings.load({"PRESET": "local", "RUN_DIR": str(run_dir)})
    return dataclasses.replace(base, **{**dict(model=str(save_small_model(run_dir / "model")), max_steps=3,
                                               num_generations=4, max_inflight=4, learning_rate=5e-3), **changes})


def fill_adapter(model: torch.nn.Module, seed: int) -> None:
    """Moves every B of a PEFT model away from zero, so that its adapter acts."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
