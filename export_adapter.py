#!/usr/bin/env python3
"""Publishes a checkpoint: adapter files and a model card, as a folder or to the Hub; optionally the merged model too.

    RUN_DIR=runs/job-1 python export_adapter.py --local-dir out                      # RUN_DIR/adapter
    RUN_DIR=runs/job-1 python export_adapter.py --checkpoint runs/job-1/checkpoints/checkpoint-300 --local-dir out
    ... --merged                   also writes out/merged: base + adapter in one model, log-probs compared
    ... --push you/name            uploads the folder to the Hub repository (needs HF_TOKEN)

The card's figures come from a results file of eval_adapter.py (--results, default RUN_DIR/eval/final_results.json) that
evaluated this very adapter; without one the card says that it was not evaluated.
Exit codes: 0 ok · 64 wrong settings, incomplete checkpoint or foreign results · 69 the Hub refused.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from recipe import pristine
from recipe.adapters import ADAPTER_FILES, AdapterError, check_adapter
from recipe.config import Settings, SettingsError
from recipe.evaluation import adapter_digest
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser
from recipe.model_card import render_card

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def load_results(file: Path | None, adapter: Path) -> dict | None:
    """The evaluation of `adapter`. Raises AdapterError when the file is about other weights; None without a file."""
    if file is None:
        return None
    result = json.loads(file.read_text())
    if result.get("adapter_digest") != adapter_digest(adapter):
        raise AdapterError(f"{file} is not about {adapter}: its cells were made with other adapter weights. Evaluate "
                           "this adapter (run_eval.sh --adapter …) or name another --results")
    return result


def export(settings: Settings, adapter: Path, results: Path | None, out: Path) -> Path:
    """Writes adapter, tokenizer, card and results to `out`, which must be empty or absent."""
    check_adapter(adapter)
    result = load_results(results, adapter)
    if out.exists() and any(out.iterdir()):
        raise AdapterError(f"{out} is not empty: name a new folder, so that nothing old is published")
    out.mkdir(parents=True, exist_ok=True)
    for name in (*ADAPTER_FILES, *TOKENIZER_FILES):
        if (adapter / name).exists():
            shutil.copyfile(adapter / name, out / name)
    if result:
        (out / "eval").mkdir()
        shutil.copyfile(results, out / "eval" / results.name)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (out / "README.md").write_text(render_card(settings, config, result))
    return out


def merge(settings: Settings, adapter: Path, out: Path) -> float:
    """Writes base + adapter as one model to `out`; returns the mean |difference| of log-probs (nats) between the
    merged model, read back, and base with adapter. Raises AdapterError when it is above bf16 noise."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": settings.model, **settings.hub_revision}
    base = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, settings.dtype))
    tokenizer = AutoTokenizer.from_pretrained(**source)
    ids = tokenizer(pristine.TEXT)["input_ids"]
    model = PeftModel.from_pretrained(base, adapter).eval()
    expected = pristine.logprobs(model, ids)
    merged = model.merge_and_unload()
    config = base.config.to_diff_dict()
    merged.save_pretrained(out)
    tokenizer.save_pretrained(out)
    keep_engine_keys(settings.model, settings.hub_revision.get("revision"), out / "config.json", config)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, settings.dtype)).eval()
    off = pristine.distance(pristine.logprobs(again, ids), expected)
    if off > pristine.TOLERANCE[settings.dtype]:
        raise AdapterError(f"the merged model differs from base with adapter by {off:.4f} nats on average: "
                           f"{out} must not be published")
    return off


def keep_engine_keys(model: str, revision: str | None, file: Path, known: dict) -> None:
    """vLLM reads keys of the base's config.json (conv_dim, block_ff_dim, …) that transformers does not write back."""
    if Path(model).is_dir():
        original = Path(model) / "config.json"
    else:
        from huggingface_hub import hf_hub_download

        original = Path(hf_hub_download(model, "config.json", revision=revision))
    written = json.loads(file.read_text())
    missing = {key: value for key, value in json.loads(original.read_text()).items() if key not in written | known}
    file.write_text(json.dumps(written | missing, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="adapter or checkpoint folder (default: RUN_DIR/adapter)")
    parser.add_argument("--results", type=Path, help="results file of eval_adapter.py or eval_watch.py")
    parser.add_argument("--local-dir", type=Path, required=True, help="folder that is written")
    parser.add_argument("--merged", action="store_true", help="also write the merged model to LOCAL_DIR/merged")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to this Hub repository")
    args = parser.parse_args(argv)
    try:
        settings = Settings.load()
        adapter = args.checkpoint or settings.run_path / "adapter"
        results = args.results
        if results is None and settings.run_dir and (settings.run_path / "eval" / "final_results.json").exists():
            results = settings.run_path / "eval" / "final_results.json"
        out = export(settings, adapter, results, args.local_dir)
        print(f"wrote {out}")
        if args.merged:
            off = merge(settings, adapter, out / "merged")
            print(f"wrote {out / 'merged'}; mean |Δlogp| against base with adapter: {off:.2g}")
    except (SettingsError, AdapterError, FileNotFoundError) as err:
        print(f"not exported: {err}", file=sys.stderr)
        return EXIT_USAGE
    if args.push:
        from huggingface_hub import HfApi

        try:
            HfApi().create_repo(args.push, exist_ok=True)
            HfApi().upload_folder(repo_id=args.push, folder_path=out, commit_message="Adapter and model card")
        except OSError as err:
            print(f"{out} is complete, but the upload failed: {err}\nRun the same command with a new --local-dir, or "
                  f"`hf upload {args.push} {out}`", file=sys.stderr)
            return EXIT_UNAVAILABLE
        print(f"pushed to https://huggingface.co/{args.push}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
