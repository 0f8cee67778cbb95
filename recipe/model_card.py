"""The model card of a published adapter: metadata that the Hub reads, settings, results, how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from recipe import report
from recipe.config import Settings

BODY = """
# {title}

A LoRA adapter for `{model}`, trained with asynchronous GRPO on rollouts of the unmodified
[OpenCode](https://opencode.ai) agent (version {opencode}) in sandboxes, rewarded by each task's verifier.

## Load it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{model}")
model = PeftModel.from_pretrained(base, "{repo}")
```

```bash
vllm serve {model} --enable-lora --max-lora-rank {rank} --lora-modules opencode-lora={repo}
```

OpenCode always sends `tool_choice="auto"`: for the agent add `--enable-auto-tool-choice --tool-call-parser lfm2`.

## Evaluation

{evaluation}

## Training

| setting | value |
| --- | --- |
{settings}

## Intended use and limits

Answering data questions by running shell commands in a sandbox. The agent executes what the model writes: run it where
that can do no harm. Only the tasks above were measured; other harnesses and tasks were not. The licence is the base
model's.
"""
SHOWN = ("model_revision", "max_steps", "learning_rate", "lora_alpha", "lora_dropout", "num_generations",
         "max_staleness", "efficiency_bonus", "temperature", "max_output_tokens", "max_model_calls", "agent_timeout",
         "dtype", "seed")


def render_card(settings: Settings, adapter_config: dict[str, Any], result: dict[str, Any] | None) -> str:
    """The whole README.md: YAML metadata and text. `result` is a results file of the evaluation of this adapter."""
    on_hub = not Path(settings.model).is_dir()
    name = (settings.adapter_repo or "adapter").rsplit("/", 1)[-1]
    data = ModelCardData(
        # A local folder is no Hub id, which the Hub's own check of the card would refuse.
        base_model=settings.model if on_hub else None,
        library_name="peft", pipeline_tag="text-generation", tags=["lora", "grpo", "opencode", "agent"],
        license="other", license_name="lfm1.0", model_name=name, eval_results=_eval_results(result) if result else None)
    rows = [("LoRA rank", adapter_config["r"]), ("LoRA modules", ", ".join(sorted(adapter_config["target_modules"])))]
    rows += [(field, getattr(settings, field)) for field in SHOWN]
    model = settings.model if on_hub else Path(settings.model).name
    text = BODY.format(
        title=name, model=model, repo=settings.adapter_repo or "PATH/TO/THIS/FOLDER", rank=adapter_config["r"],
        opencode=settings.opencode_version, settings="\n".join(f"| {key} | {value} |" for key, value in rows),
        evaluation=_evaluation(result) if result else "This adapter was not evaluated.")
    return f"---\n{data.to_yaml()}\n---\n{text}"


def _eval_results(result: dict[str, Any]) -> list[EvalResult]:
    if result["adapter"]["pass_at_1"] is None:
        return []
    return [EvalResult(task_type="text-generation", dataset_type="held-out-tasks",
                       dataset_name=f"{result['tasks']} held-out tasks", metric_type="pass@1", metric_name="pass@1",
                       metric_value=round(result["adapter"]["pass_at_1"], 4))]


def _evaluation(result: dict[str, Any]) -> str:
    return (f"{result['tasks']} held-out tasks, each with the base and with this adapter, same sampling and limits as "
            f"in training. Cells that did not run are ungraded and in no rate.\n\n{report.render(result)}")
