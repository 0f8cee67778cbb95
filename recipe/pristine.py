"""Proof that an engine's base is the base and its adapter the adapter, asked of the engine itself.

After training the engine holds merged weights under the base's name; an evaluation on it would compare the adapter
with itself. So before the first cell the log-probs of a fixed text, as the engine serves it, are compared with those
computed here from the files: the base's, and the base's with the adapter.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from recipe.config import Settings
from recipe.policy_client import PolicyClient

TEXT = ("The task is to find the mean of column price in /home/user/input/data.csv and to write it, rounded to two "
        "decimals, to /workdir/answer.txt. First look at the file: head -n 5 /home/user/input/data.csv")
# Mean |difference| in nats. In bfloat16 two correct engines differ by about 0.04 here, and a base from one with a
# trained adapter by 0.2 to 0.3; in float32 two correct engines agree to 1e-5.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class NotPristine(RuntimeError):
    """The engine does not serve the weights that the evaluation is about."""


def check(settings: Settings, client: PolicyClient, adapter: Path, adapter_name: str) -> dict[str, Any]:
    """Compares the engine with the files of MODEL and of `adapter` (served as `adapter_name`).

    Returns the measured differences for the results file. Raises NotPristine with what to do.
    """
    base = client.models().get(settings.model)
    if base is None or base.get("parent"):
        raise NotPristine(f"the policy server does not serve {settings.model} as a base model: start it with "
                          "serve_policy.sh --mode eval and the same MODEL")
    ids, base_ref, adapter_ref = reference_logprobs(settings, adapter)
    base_got, adapter_got = client.prompt_logprobs(settings.model, ids), client.prompt_logprobs(adapter_name, ids)
    found = {"tokens": len(ids), "tolerance": TOLERANCE[settings.dtype],
             "base_against_files": distance(base_got, base_ref),
             "adapter_against_files": distance(adapter_got, adapter_ref),
             "adapter_against_base": distance(adapter_got, base_got)}
    for name, what in (("base", settings.model), ("adapter", f"{settings.model} with {adapter}")):
        if found[f"{name}_against_files"] > found["tolerance"]:
            raise NotPristine(
                f"the policy server's {name} is not {what}: its log-probs differ from those of the files by "
                f"{found[f'{name}_against_files']:.4f} nats on average (tolerance {found['tolerance']}). It may still "
                "hold the weights of training: restart it with serve_policy.sh --mode eval, then evaluate again")
    return found


def check_model(settings: Settings, client: PolicyClient, weights: Path | None) -> dict[str, Any]:
    """The same of an engine that holds one model under the name of MODEL: that of the folder `weights`, or MODEL."""
    ids, model = _load(settings, weights)
    found = {"tokens": len(ids), "tolerance": TOLERANCE[settings.dtype],
             "model_against_files": distance(client.prompt_logprobs(settings.model, ids), logprobs(model, ids))}
    if found["model_against_files"] > found["tolerance"]:
        raise NotPristine(f"the policy server does not hold {weights or settings.model}: its log-probs differ from "
                          f"those of the files by {found['model_against_files']:.4f} nats on average (tolerance "
                          f"{found['tolerance']}): restart it with serve_policy.sh --mode eval"
                          + (f" --weights {weights}" if weights else ""))
    return found


def reference_logprobs(settings: Settings, adapter: Path) -> tuple[list[int], list[float], list[float]]:
    """Token ids of TEXT and the log-probs of ids[1:] under the base and under base + adapter, on the CPU."""
    from peft import PeftModel

    ids, model = _load(settings)
    base = logprobs(model, ids)
    return ids, base, logprobs(PeftModel.from_pretrained(model, adapter).eval(), ids)


def _load(settings: Settings, weights: Path | None = None) -> tuple[list[int], Any]:
    """Token ids of TEXT, and the model of `weights` or MODEL on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # a slow fallback of one forward needs no advice in the evaluation's log
    logging.disable_progress_bar()

    source = {"pretrained_model_name_or_path": settings.model, **settings.hub_revision}
    ids = AutoTokenizer.from_pretrained(**source)(TEXT)["input_ids"]
    model = {"pretrained_model_name_or_path": weights} if weights else source
    return ids, AutoModelForCausalLM.from_pretrained(**model, dtype=getattr(torch, settings.dtype)).eval()


def logprobs(model: Any, ids: list[int]) -> list[float]:
    """Log-probs (nats) of ids[1:], each given those before it, under a causal LM on the CPU."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()


def distance(a: list[float], b: list[float]) -> float:
    """Mean absolute difference of two equally long lists of log-probs."""
    return fmean(abs(x - y) for x, y in zip(a, b, strict=True))
