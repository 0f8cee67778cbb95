"""From a model folder to a running service."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, Lfm2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from recipe.policy_cpu.chat import Text
from recipe.policy_cpu.engine import Engine
from recipe.policy_cpu.lfm2_calls import END, START
from recipe.policy_cpu.model import Lfm2Runner
from recipe.policy_cpu.prefix_cache import PrefixCache
from recipe.policy_cpu.service import Service
from recipe.policy_cpu.weights import WeightStore

BLOCK = 64  # positions between two points that a later request can start from


class ModelRefused(ValueError):
    """The model is not one for this server; the message says what to do."""


def load_service(args: argparse.Namespace, on_death: Callable[[], None] = lambda: None) -> Service:
    """Loads the model that `__main__.parse_args` names. Raises ModelRefused."""
    config = _checked_config(args.model, args.max_parameters, args.max_model_len)
    dtype = getattr(torch, args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.chat_template:
        tokenizer.chat_template = args.chat_template.read_text()
    missing = [token for token in (START, END) if token not in tokenizer.get_vocab()]
    if missing or not tokenizer.chat_template:
        raise ModelRefused(f"the tokenizer of {args.model} lacks {missing or 'a chat template'}: "
                           "tool calls could be neither asked for nor read.")
    disable_progress_bar()  # the log is read by people
    model = Lfm2ForCausalLM.from_pretrained(args.model, dtype=dtype).eval().requires_grad_(False)
    positions = torch.arange(args.max_model_len).unsqueeze(0)
    cos, sin = model.model.rotary_emb(torch.empty(1, 1, dtype=dtype), positions)
    store = WeightStore(config, {name: p.data for name, p in model.named_parameters()},
                        args.served_model_name or args.model, args.max_lora_rank)
    text = Text(tokenizer)
    engine = Engine(Lfm2Runner(config, (cos[0], sin[0]), dtype, BLOCK), store,
                    PrefixCache(BLOCK, args.prefix_cache_mb * 2**20), eos_id=tokenizer.eos_token_id,
                    extra_stop_ids=_extra_stop_ids(args.model, tokenizer.eos_token_id), decode=text.decode,
                    max_running=args.max_num_seqs, on_death=_tell(on_death))
    return Service(engine, store, text, args.model, args.max_model_len, args.dtype, args.enable_lora,
                   args.dev_mode)


def _checked_config(model: str, max_parameters: int, max_model_len: int):
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelRefused(f"cannot read the model {model}: {error}") from error
    if config.model_type != "lfm2":
        raise ModelRefused(f"{model} is a {config.model_type} model; the CPU policy server runs lfm2 models only.")
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Lfm2ForCausalLM(config).parameters())
    if parameters > max_parameters:
        raise ModelRefused(
            f"{model} has {parameters / 1e6:,.0f} million parameters; the CPU policy server takes at most "
            f"{max_parameters / 1e6:,.0f} million. Set ENGINE=vllm on a machine with a GPU, or MODEL to a small model.")
    if max_model_len > config.max_position_embeddings:
        raise ModelRefused(f"MAX_MODEL_LEN={max_model_len} exceeds the {config.max_position_embeddings} positions of "
                           f"{model}: lower it.")
    return config


def _extra_stop_ids(model: str, eos_id: int | None) -> frozenset[int]:
    """generation_config's eos ids other than the tokenizer's own, which vLLM stops at as well."""
    try:
        ids = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        return frozenset()
    ids = {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(ids - {eos_id})


def _tell(on_death: Callable[[], None]) -> Callable[[], None]:
    def tell() -> None:
        traceback.print_exc()
        on_death()

    return tell
