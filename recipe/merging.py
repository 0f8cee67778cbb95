"""Base and adapter as one model on disk, and the proof that it is what both were together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe import pristine
from recipe.adapters import AdapterError
from recipe.weight_sync import merged_parameters

# What the model meets: a task, a call and its result, an answer; and text that has nothing to do with the training.
PROMPTS = (
    pristine.TEXT,
    "The file /home/user/input/data.csv is a CSV file with a header row. How many different values does column 2 have? "
    "Write only the value to /workdir/answer.txt, then stop.\n<|tool_call_start|>[bash(command=\"cut -d, -f2 "
    "/home/user/input/data.csv | tail -n +2 | sort -u | wc -l > /workdir/answer.txt\")]<|tool_call_end|>",
    "In the spring the river rises above its banks, and the fields on both sides are under water for a week.",
)


def merge(source: Mapping[str, Any], adapter: Path, out: Path, dtype: str = "bfloat16") -> tuple[float, float]:
    """Writes base + adapter as one model to `out`, each weight computed in fp32 and rounded once to `dtype`.

    `source` is what from_pretrained takes for the base. Returns mean |difference| of log-probs (nats) over PROMPTS
    between the model read back from `out` and base with adapter, and the same between base with adapter and base.
    Raises AdapterError when the first is above the noise of `dtype`.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype)).eval()

    tokenizer = AutoTokenizer.from_pretrained(**source)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]

    def scores(model: Any) -> list[float]:
        return [score for ids in prompts for score in pristine.logprobs(model, ids)]

    plain = base()
    known, before = plain.config.to_diff_dict(), scores(plain)
    model = PeftModel.from_pretrained(plain, adapter).eval()
    expected, weights = scores(model), dict(merged_parameters(model))
    del model, plain
    merged = base()
    missing = merged.load_state_dict(weights, strict=False).unexpected_keys
    if missing:
        raise AdapterError(f"the merged weights have names that the base does not know: {missing[:3]}")
    merged.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _keep_engine_keys(source, out / "config.json", known)
    off = pristine.distance(scores(AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype)).eval()),
                            expected)
    if off > pristine.TOLERANCE[dtype]:
        raise AdapterError(f"the merged model differs from base with adapter by {off:.4f} nats on average: "
                           f"{out} must not be published")
    return off, pristine.distance(before, expected)


def _keep_engine_keys(source: Mapping[str, Any], file: Path, known: Mapping[str, Any]) -> None:
    """vLLM reads keys of the base's config.json (conv_dim, block_ff_dim, …) that transformers does not write back."""
    model = str(source["pretrained_model_name_or_path"])
    if Path(model).is_dir():
        original = Path(model) / "config.json"
    else:
        from huggingface_hub import hf_hub_download

        original = Path(hf_hub_download(model, "config.json", revision=source.get("revision")))
    written = json.loads(file.read_text())
    missing = {k: v for k, v in json.loads(original.read_text()).items() if k not in written and k not in known}
    file.write_text(json.dumps(written | missing, indent=2) + "\n")
