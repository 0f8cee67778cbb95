"""Makes tiny/model: an LFM2.5-shaped model of about a million parameters that acts, not well, in OpenCode's format.

    python -m tiny.make_tiny                          # 2 minutes with --device cuda, 15 on a CPU; overwrites tiny/model
    python -m tiny.make_tiny --steps 300 --out /tmp/m # a cruder one

It is trained from scratch in three phases: repeated random tokens, until it can copy what stands earlier in the
context; transcripts (tiny/transcripts.py) of tasks that belong to neither split of a run; the same behind OpenCode's
whole prompt. The same seed gives the same model on the same machine and versions. `python -m tiny.offline` measures it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from transformers import GenerationConfig, Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerFast

from recipe.local_tasks import ROUND, make_task
from tiny.tokenizer import make_tokenizer
from tiny.transcripts import behaviour, request, varied_system

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 128, 256, 4, 2  # heads of 32, a size that vLLM's attention kernels take
LAYERS = ("conv", "conv", "full_attention", "conv", "full_attention")
ROPE_THETA = 1e6
COPY_STEPS = 120  # copying is learned within about 100; without it transcripts stay on a plateau for as long again
BATCH = 24  # transcripts of a step
SHORT = 0.75  # share of the steps on transcripts that do without OpenCode's own prompt
Row = tuple[list[int], list[bool]]  # token ids, and which of them are learned


def make_config(tokenizer: PreTrainedTokenizerFast) -> Lfm2Config:
    """The architecture, with the original checkpoint keys beside transformers' (vLLM reads those)."""
    config = Lfm2Config(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=len(LAYERS),
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, layer_types=list(LAYERS), conv_L_cache=3,
        conv_bias=False, block_auto_adjust_ff_dim=False, tie_word_embeddings=True, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, architectures=["Lfm2ForCausalLM"])
    config.update({"conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_dim": HIDDEN, "block_ff_dim": FEED_FORWARD,
                   "block_mlp_init_scale": 1.0, "block_norm_eps": config.norm_eps, "num_heads": HEADS,
                   "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0, "theta": ROPE_THETA,
                   "full_attn_idxs": [i for i, kind in enumerate(LAYERS) if kind == "full_attention"]})
    return config


def encode_prefixes(tokenizer: PreTrainedTokenizerFast, rng: random.Random, n: int) -> list[list[int]]:
    """Token ids of OpenCode's own prompt in `n` variants (date, model, tools), without the start token."""
    prefixes = []
    for _ in range(n):
        messages, tools = request("", training=rng.random() < 0.7, system=varied_system(rng))
        prefixes.append(tokenizer.apply_chat_template(messages[:1], tools=tools)["input_ids"][1:])
    return prefixes


def encode(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Row:
    """Token ids of one fresh transcript without OpenCode's own prompt, and which of them the model wrote."""
    task = make_task(rng, "warm", rng.choice(ROUND), 0)
    messages = [*request(task.instruction)[0][1:], *behaviour(task, rng)]
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, written = out["input_ids"], [bool(mask) for mask in out["assistant_masks"]]
    # The template counts the line end after <|im_end|> as written too; a sampler stops before it.
    return ids, [mask and previous != tokenizer.eos_token_id
                 for mask, previous in zip(written, [None, *ids[:-1]], strict=True)]


def loss_of(model: Lfm2ForCausalLM, transcripts: list[Row]) -> torch.Tensor:
    """Mean cross-entropy (nats a token) of what the model wrote; rows are padded on the right."""
    length = max(len(ids) for ids, _ in transcripts)
    ids = torch.zeros(len(transcripts), length, dtype=torch.long)
    learned = torch.zeros(len(transcripts), length, dtype=torch.bool)
    for row, (tokens, mask) in enumerate(transcripts):
        ids[row, :len(tokens)] = torch.tensor(tokens)
        learned[row, :len(mask)] = torch.tensor(mask)
    # Causal attention and convolutions never look right, so padding there needs no mask.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][learned[:, 1:]]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), ids[:, 1:][learned[:, 1:]])


def copy_batch(vocabulary: int, rows: int = 32, repeated: int = 20, between: int = 8) -> list[Row]:
    """Sequences `a b a` of random tokens with the second `a` but its first token to be learned."""
    a, b = (torch.randint(14, vocabulary, (rows, n)) for n in (repeated, between))
    mask = [False] * (repeated + between + 1) + [True] * (repeated - 1)
    return [(row, mask) for row in torch.cat([a, b, a], dim=1).tolist()]


def train(model: Lfm2ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int, peak_lr: float,
          copy_steps: int = COPY_STEPS) -> None:
    rng = random.Random(f"warm start {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / 20, max(0.02, 1 - max(0, done - copy_steps) / steps)))
    prefixes = encode_prefixes(tokenizer, rng, 64)
    start, recent = time.monotonic(), []
    for step in range(-copy_steps, steps):
        full = step >= SHORT * steps
        batch = copy_batch(len(tokenizer)) if step < 0 else [encode(tokenizer, rng) for _ in range(BATCH)]
        if full:  # a special token stands at the joint, so joining ids is encoding the joined text
            batch = [([ids[0], *prefix, *ids[1:]], [False] * len(prefix) + mask)
                     for (ids, mask), prefix in zip(batch, rng.choices(prefixes, k=BATCH), strict=True)]
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[-24:], loss.item()]
        if step % 25 == 24 or step == steps - 1:
            phase = "copying" if step < 0 else "whole prompts" if full else "short prompts"
            mean, seconds = sum(recent) / len(recent), time.monotonic() - start
            print(f"step {step + 1}/{steps}, {phase}: loss {mean:.4f}, {seconds:.0f} s", flush=True)


def save(model: Lfm2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """bfloat16 weights (the float32 values that a loader gets are exact), tokenizer, template, generation settings."""
    out.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    n = sum(p.numel() for p in model.parameters())
    print(json.dumps({"folder": str(out), "parameters": n, "bytes": size, "vocabulary": len(tokenizer)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=1000, help="steps on transcripts (default %(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="the result depends on it (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; the model in the repository was made on cuda")
    args = parser.parse_args()
    torch.set_default_device(args.device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(args.seed)
    model = Lfm2ForCausalLM(make_config(tokenizer)).float()
    train(model, tokenizer, args.steps, args.seed, args.lr)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
