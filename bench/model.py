"""A model of LFM2.5-2.6B's shape with random weights, for machines that have no network.

    python3 -m bench.model FOLDER [--layers 30] [--device cuda]      25 s on a GPU, 5.1 GB

Hidden size 2048, MLP 10752, 32 heads, 8 key-value heads, 65,536 tokens, 20 short convolutions and 10 attention layers.
The config carries the original checkpoint's keys beside transformers' own (vLLM reads those). The tokenizer is the tiny
model's, filled up with unused words to the full vocabulary, so that every id has a text; special ids are LFM2's own.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from recipe.config import REPO
from recipe.exits import Parser

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, VOCABULARY, LAYERS = 2048, 10752, 32, 8, 65536, 30
THETA = 1e6
TINY = REPO / "tiny" / "model"
FOLDER = Path("/tmp/lfm-random-2.6b")  # made once, for all benchmarks and tests


def layer_types(layers: int = LAYERS) -> list[str]:
    """Every third layer attends: 20 + 10 of 30."""
    return ["full_attention" if i % 3 == 2 else "conv" for i in range(layers)]


def make_config(layers: int = LAYERS, **changes: int):
    from transformers import Lfm2Config

    kinds = layer_types(layers)
    shape = dict(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_attention_heads=HEADS,
                 num_key_value_heads=KV_HEADS) | changes
    config = Lfm2Config(
        **shape, num_hidden_layers=layers, layer_types=kinds, conv_L_cache=3, conv_bias=False,
        block_auto_adjust_ff_dim=False, tie_word_embeddings=True, max_position_embeddings=128_000,
        rope_parameters={"rope_type": "default", "rope_theta": THETA}, pad_token_id=0, bos_token_id=1, eos_token_id=7,
        architectures=["Lfm2ForCausalLM"])
    width = config.hidden_size
    config.update({"conv_dim": width, "conv_dim_out": width, "block_dim": width,
                   "block_ff_dim": config.intermediate_size, "block_mlp_init_scale": 1.0,
                   "block_norm_eps": config.norm_eps, "num_heads": config.num_attention_heads, "block_multiple_of": 1,
                   "block_ffn_dim_multiplier": 1.0, "theta": THETA,
                   "full_attn_idxs": [i for i, kind in enumerate(kinds) if kind == "full_attention"]})
    return config


def make_model(folder: Path, layers: int = LAYERS, device: str = "cuda", **changes: int) -> Path:
    """Writes the model to `folder`; one that is there already is kept."""
    if (folder / "made").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM

    config = make_config(layers, **changes)
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    taken = set(tokenizer["model"]["vocab"].values()) | {token["id"] for token in tokenizer["added_tokens"]}
    tokenizer["model"]["vocab"] |= {f"<t{i}>": i for i in range(config.vocab_size) if i not in taken}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "made").touch()
    return folder


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    print(make_model(args.folder, args.layers, args.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
