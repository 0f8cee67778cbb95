"""A random LFM2.5-shaped model folder for the tests of the policy server, made in a second.

    python tests/contract/policy_fixture.py FOLDER

LFM2.5's special tokens have their ids and TRL's copy of its chat template is used; text is byte-level BPE.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerFast
from trl.chat_template_utils import lfm2_2_5_v2_chat_template

SPECIAL = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|fim_pre|>", "<|fim_mid|>", "<|fim_suf|>", "<|im_start|>",
           "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
TEXTS = ("You are an agent. Use the bash tool to list the files in /tmp.", "List of tools: [{\"type\": \"function\"}]",
         "Reply with the single word: ok", "bash(command='ls -la /home/user/input')")


def make_model(folder: Path, seed: int = 0, std: float = 0.3, **changes) -> Path:
    """Writes model, tokenizer and generation config to `folder`. std: large enough that mistakes show in log-probs."""
    tokenizer = _tokenizer()
    config = Lfm2Config(**{**dict(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=48, intermediate_size=96, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, conv_L_cache=3, block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv", "conv", "full_attention"], max_position_embeddings=4096,
        tie_embedding=True, pad_token_id=0, bos_token_id=1, eos_token_id=7), **changes})
    torch.manual_seed(seed)
    model = Lfm2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=std)
    model.tie_weights()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[7],
        chat_template=lfm2_2_5_v2_chat_template).save_pretrained(folder)
    GenerationConfig(eos_token_id=[7, 2], pad_token_id=0, bos_token_id=1).save_pretrained(folder)
    return folder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=400, special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], 1)])
    return tokenizer


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))
