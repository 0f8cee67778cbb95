"""The model card of a published adapter: metadata that the Hub reads, settings, results, how to load it.

Everything in it comes from files of the run: the settings and the step from the sealed checkpoint, the figures from a
results file. `check` compares a finished card with the results beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from recipe import report, task_source
from recipe.adapters import AdapterError
from recipe.config import REPO

LICENCE, LICENCE_LINK = "lfm1.0", "https://huggingface.co/{base}/blob/main/LICENSE"
CURVE = "learning_curve.png"
BODY = """
# {title}

A LoRA adapter for {base}, trained with asynchronous GRPO on rollouts of the unmodified
[OpenCode](https://opencode.ai) agent (version {opencode}) in sandboxes, rewarded by each task's verifier.

## Load it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{model}"{revision})
model = PeftModel.from_pretrained(base, "{repo}")
```

```bash
vllm serve {model} --enable-lora --max-lora-rank {rank} --lora-modules opencode-lora={repo}
```

OpenCode always sends `tool_choice="auto"`: for the agent add `--enable-auto-tool-choice --tool-call-parser {parser}`.

## Evaluation

{evaluation}

## Training

| setting | value |
| --- | --- |
{settings}

## Intended use and limits

{use} in a sandbox, with OpenCode as the agent. The agent
executes what the model writes: run it where that can do no harm, without secrets in its reach.

- Only the tasks above were measured, with the sampling and the limits above; other harnesses, tools, languages and
  longer tasks were not.
- The reward is a verifier's: the model was taught to write what it expects, not to explain it or to doubt it.
- Whatever the base model gets wrong outside these tasks, the adapter has not been trained to get right.

## Licence

The adapter is a derivative of {base} and under its licence{licence}.
"""
USE = {"smoldataenvs": "Answering questions about data files by running shell commands",
       "deepcoder": "Solving competitive-programming problems by writing and trying programs"}
SHOWN = ("model_revision", "learning_rate", "lora_alpha", "lora_dropout", "num_generations", "max_staleness",
         "efficiency_bonus", "zero_contrast", "thinking", "temperature", "top_p", "top_k", "max_output_tokens",
         "max_model_calls", "agent_timeout", "opencode_version", "dtype", "seed", "n_train_tasks")


@dataclass(frozen=True)
class Facts:
    """What a card is made of. `training` are the checkpoint's settings.json, `config` its adapter_config.json."""

    step: int
    training: dict[str, Any]
    config: dict[str, Any]
    repo: str  # owner/name under which it is published; empty when it is not
    result: dict[str, Any] | None = None
    result_file: str = ""  # path of its file in the published folder
    curve: dict[str, Any] | None = None

    @property
    def base(self) -> str | None:
        """Hub id of the base model; None for a local one, which the Hub would refuse in the metadata."""
        return model if "/" in (model := self.training["model"]) else None

    @property
    def base_in_words(self) -> str:
        """The base model in a sentence; a local one by the name of its folder and its architecture, not by its path."""
        if self.base:
            return f"[{self.base}](https://huggingface.co/{self.base})"
        folder = Path(self.config.get("base_model_name_or_path") or "").resolve()
        name = "tiny/model` of the recipe" if folder == REPO / "tiny/model" else f"{self.training['model']}`"
        try:
            architecture = f", {json.loads((folder / 'config.json').read_text())['architectures'][0]}"
        except (OSError, ValueError, LookupError, TypeError):
            architecture = ""
        return f"a local model that is not on the Hub (folder `{name}{architecture})"

    @property
    def licence(self) -> dict[str, str]:
        """The licence in the metadata; empty where the base's is not known."""
        return {"license": "other", "license_name": LICENCE, "license_link": LICENCE_LINK.format(base=self.base)
                } if (self.base or "").startswith("LiquidAI/") else {}


def render(facts: Facts) -> str:
    """The whole README.md: YAML metadata and text."""
    training, base = facts.training, facts.base
    data = task_source.dataset(training.get("data", ""))
    name = (facts.repo or f"adapter-{facts.step}").rsplit("/", 1)[-1]
    metadata = ModelCardData(
        base_model=base, base_model_relation="adapter" if base else None, library_name="peft",
        pipeline_tag="text-generation", tags=["lora", "grpo", "opencode", "agent"],
        datasets=[data[0]] if data else None, **facts.licence,
        model_name=name, eval_results=eval_results(facts.result) if facts.result else None)
    rows = [("optimizer steps", facts.step), ("training tasks from", training.get("data") or "not noted"),
            ("LoRA rank", facts.config["r"]), ("LoRA modules", ", ".join(sorted(facts.config["target_modules"])))]
    rows += [(key, training[key]) for key in SHOWN if key in training]
    pinned = training.get("model_revision", "main")
    text = BODY.format(
        title=name, base=facts.base_in_words, use=USE[training.get("recipe", "smoldataenvs")],
        parser=training.get("tool_call_parser", "lfm2"), model=base or "PATH/TO/THE/BASE",
        revision=f', revision="{pinned}"' if base and pinned != "main" else "",
        repo=facts.repo or "PATH/TO/THIS/FOLDER", rank=facts.config["r"],
        opencode=training.get("opencode_version", "unknown"),
        licence=", [{license_name}]({license_link})".format(**facts.licence) if facts.licence else "",
        settings="\n".join(f"| {key} | {value} |" for key, value in rows), evaluation=_evaluation(facts))
    return f"---\n{metadata.to_yaml()}\n---\n{text}"


def eval_results(result: Mapping[str, Any]) -> list[EvalResult]:
    """The model-index: pass@1 of the adapter, on the dataset of the held-out tasks where they are on the Hub."""
    if result["adapter"]["pass_at_1"] is None:
        return []
    data = task_source.dataset(result.get("tasks_source", ""))
    return [EvalResult(task_type="text-generation", dataset_type=data[0] if data else "generated-tasks",
                       dataset_name=f"{result['tasks']} held-out tasks", dataset_revision=data[1] if data else None,
                       metric_type="pass@1", metric_name="pass@1",
                       metric_value=round(result["adapter"]["pass_at_1"], 4))]


def _evaluation(facts: Facts) -> str:
    parts = []
    if facts.result:
        source = facts.result.get("tasks_source")
        parts.append(f"{facts.result['tasks']} held-out tasks{f' ({source})' if source else ''}, each with the base "
                     "and with this adapter, same sampling and limits as in training. Cells that did not run are "
                     f"ungraded and in no rate. The figures are those of `{facts.result_file}`.")
        parts.append(report.render(facts.result))
    else:
        parts.append("This adapter was not evaluated.")
    if facts.curve:
        parts.append(f"![pass@1 of every checkpoint with 95% intervals, the base as a band]({CURVE})")
    return "\n\n".join(parts)


def check(folder: Path) -> ModelCard:
    """Parses the card of a published folder and compares its figures with the results file beside it.

    Raises AdapterError for metadata that huggingface_hub cannot read and for a figure that the results do not have.
    """
    try:
        card = ModelCard.load(folder / "README.md")
    except (ValueError, OSError, yaml.YAMLError) as err:
        raise AdapterError(f"{folder / 'README.md'} is no model card: {err}") from err
    results = [json.loads(file.read_text()) for file in sorted((folder / "eval").glob("*_results.json"))]
    known = [(report.render(result), eval_results(result)) for result in results]
    shown = [(e.metric_type, e.metric_value) for e in card.data.eval_results or []]
    tables = _tables(card.text.partition("## Evaluation")[2].partition("\n## ")[0])
    for table, entries in known:
        if _tables(table) == tables and [(e.metric_type, e.metric_value) for e in entries] == shown:
            return card
    if tables or shown:
        raise AdapterError(f"{folder / 'README.md'} shows figures that no results file in {folder / 'eval'} has: "
                           "export again rather than edit a figure")
    return card


def _tables(text: str) -> list[str]:
    return [line.replace(" ", "") for line in text.splitlines() if line.startswith("|")]
