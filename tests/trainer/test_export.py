"""Exported adapters: the card says what checkpoint and results say, and the merged model is base with adapter."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import export_adapter
from recipe import checkpoints, merging, model_card, pristine, report
from recipe.adapters import adapter_digest
from recipe.config import REPO, Settings

TINY = REPO / "tiny" / "model"
HELD_OUT = "FineEnvs/SmolDataEnvs-harbor-test@b130595b579fc6026ad5762925a9a3b40e72f5bb"


def tiny_adapter():
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "w1"], init_lora_weights=False))


@pytest.fixture(scope="module")
def run_once(tmp_path_factory) -> Path:
    """A run folder with checkpoint-4 of the tiny model, its evaluation on 8 tasks and the watcher's curve."""
    run = tmp_path_factory.mktemp("made") / "run"
    settings = settings_of(run, learning_rate=3e-4)
    folder = run / "checkpoints" / "checkpoint-4"
    tiny_adapter().save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    (folder / "optimizer.pt").write_bytes(b"state")
    (run / "tasks").mkdir()
    (run / "tasks/train.json").write_text(json.dumps({"source": "FineEnvs/train@abc", "tasks": []}))
    checkpoints.seal(folder, settings)
    (run / "eval").mkdir()
    write_results(run, folder, "final", correct=6, name="final_results")
    write_results(run, folder, "checkpoint-4", correct=5, name="checkpoint-4_results")
    other = json.loads((run / "eval/checkpoint-4_results.json").read_text()) | {"adapter_digest": "other"}
    (run / "eval/checkpoint-2_results.json").write_text(json.dumps(other))
    figures = {key: other[key] for key in ("base", "adapter", "agreement", "tasks")}
    points = [{"step": step} | figures for step in (2, 4)]
    (run / "eval/summary.json").write_text(json.dumps({"checkpoints": points, "base": points[0]["base"]}))
    return run


@pytest.fixture
def run(run_once, tmp_path, monkeypatch) -> Path:
    """A copy that a test may spoil; the environment's settings are other ones than those of the training."""
    run = shutil.copytree(run_once, tmp_path / "run")
    for name, value in {"PRESET": "local", "RUN_DIR": str(run), "LEARNING_RATE": "0.5"}.items():
        monkeypatch.setenv(name, value)
    return run


def settings_of(run: Path, **more) -> Settings:
    return dataclasses.replace(Settings.load({"PRESET": "local"}), run_dir=str(run), **more)


def write_results(run: Path, adapter: Path, label: str, correct: int, name: str) -> None:
    def cells(model: str, digest: str, good: int) -> list[dict]:
        return [{"task": f"t{i}", "sample": 0, "model": model, "status": "correct" if i < good else "wrong",
                 "tool_calls": 2, "tokens": 9, "difficulty": "easy" if i % 2 else "hard",
                 "made_with": {"protocol": name, "task": "t", "adapter": digest}} for i in range(8)]

    base, other = cells("base", "", 3), cells(label, adapter_digest(adapter), correct)
    result = report.compare(base, other) | {
        "adapter_digest": adapter_digest(adapter), "adapter_name": label, "protocol": name, "tasks": 8,
        "tasks_source": HELD_OUT, "time": 1.0}
    (run / "eval" / f"{name}.json").write_text(json.dumps(result))
    with (run / "eval/cells.jsonl").open("a") as file:
        file.writelines(json.dumps(cell) + "\n" for cell in base + other)


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def export(*arguments: object) -> int:
    return export_adapter.main([str(argument) for argument in arguments])


def test_the_exported_folder_and_its_card(run, tmp_path):
    assert export("--local-dir", tmp_path / "out") == 0
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "README.md", "learning_curve.png", "eval", "export.json"}
    assert {p.name for p in (out / "eval").iterdir()} == {"final_results.json", "summary.json"}
    Image.open(out / "learning_curve.png").verify()
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.license) == ("peft", None), "nobody knows that of a folder"
    assert card.data.datasets == ["FineEnvs/train"] and card.data.base_model is None, "a folder is no Hub id"
    (entry,) = card.data.eval_results
    assert entry.metric_value == 0.75, "the full evaluation, not the watcher's subset"
    assert (entry.dataset_type, entry.dataset_revision) == tuple(HELD_OUT.split("@"))
    assert "0.750 [0.409, 0.929]" in card.text and "| · easy " in card.text and "(learning_curve.png)" in card.text
    assert f"8 held-out tasks ({HELD_OUT})" in card.text and "`eval/final_results.json`" in card.text
    assert "| optimizer steps | 4 |" in card.text and "| learning_rate | 0.0003 |" in card.text, "the checkpoint's"
    assert "| training tasks from | FineEnvs/train@abc |" in card.text
    assert "for a local model that is not on the Hub (folder `tiny/model` of the recipe, Lfm2ForCausalLM)" in card.text
    assert "vllm serve PATH/TO/THE/BASE --enable-lora --max-lora-rank 8 --lora-modules opencode-lora=" in card.text
    assert str(REPO) not in card.text and "and under its licence.\n" in card.text
    for heading in ("## Load it", "## Training", "## Intended use and limits", "## Licence"):
        assert heading in card.text


def test_the_exported_adapter_has_the_log_probs_of_the_model_that_was_saved(run, tmp_path):
    assert export("--local-dir", tmp_path / "out") == 0
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), tmp_path / "out").eval()
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(pristine.TEXT)["input_ids"]
    trained = pristine.logprobs(tiny_adapter().eval(), ids)
    assert pristine.logprobs(loaded, ids) == pytest.approx(trained, abs=1e-6)
    assert pristine.distance(pristine.logprobs(AutoModelForCausalLM.from_pretrained(TINY).eval(), ids), trained) > 0.01


def test_a_hub_base_is_in_the_metadata_and_in_the_commands(run, tmp_path):
    folder = run / "checkpoints/checkpoint-4"
    (folder / "manifest.json").unlink()
    checkpoints.seal(folder, dataclasses.replace(Settings.load({}), run_dir=str(run), model_revision="c0ffee"))
    assert export("--local-dir", tmp_path / "out") == 0
    card = ModelCard.load(tmp_path / "out/README.md")
    base = "LiquidAI/LFM2.5-2.6B"
    assert (card.data.base_model, card.data.base_model_relation) == (base, "adapter")
    licence = f"https://huggingface.co/{base}/blob/main/LICENSE"
    assert (card.data.license, card.data.license_name, card.data.license_link) == ("other", "lfm1.0", licence)
    assert f"[{base}](https://huggingface.co/{base}) and under its licence, [lfm1.0]({licence})." in card.text
    assert f'from_pretrained("{base}", revision="c0ffee")' in card.text
    assert f"vllm serve {base} --enable-lora --max-lora-rank 8 " in card.text


def test_a_base_of_ones_own_is_called_by_its_folder_and_another_base_has_no_lfm_licence(run, tmp_path):
    folder = run / "checkpoints/checkpoint-4"
    training, config = (json.loads((folder / f"{name}.json").read_text()) for name in ("settings", "adapter_config"))
    facts = model_card.Facts(step=4, training=training | {"model": "mine"}, repo="me/name",
                             config=config | {"base_model_name_or_path": f"{tmp_path}/mine"})
    card = ModelCard(model_card.render(facts))
    assert "for a local model that is not on the Hub (folder `mine`), trained" in " ".join(card.text.split())
    assert str(tmp_path) not in card.text and card.data.base_model is None
    qwen = facts.training | {"model": "Qwen/Qwen3-4B", "recipe": "deepcoder", "tool_call_parser": "hermes"}
    card = ModelCard(model_card.render(dataclasses.replace(facts, training=qwen)))
    assert card.data.base_model == "Qwen/Qwen3-4B" and card.data.license is None and "lfm" not in str(card)
    assert "--tool-call-parser hermes" in card.text and "competitive-programming" in card.text


def test_a_card_without_results_claims_nothing(run, tmp_path):
    shutil.rmtree(run / "eval")
    assert export("--local-dir", tmp_path / "out") == 0
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "was not evaluated" in card.text and not card.data.eval_results and "| both solve" not in card.text


def test_run_dir_adapter_is_the_checkpoint_with_its_weights(run, tmp_path):
    shutil.copytree(run / "checkpoints/checkpoint-4", run / "adapter",
                    ignore=shutil.ignore_patterns("manifest.json", "settings.json", "*.pt"))
    assert export("--checkpoint", run / "adapter", "--local-dir", tmp_path / "out") == 0
    assert "| optimizer steps | 4 |" in (tmp_path / "out/README.md").read_text()


def better(result: dict) -> None:
    result["adapter"] |= {"correct": 8, "wrong": 0, "pass_at_1": 1.0, "ci95": list(report.wilson(8, 8))}


SPOILED = {
    "results of other weights": ("final_results", lambda r: r.update(adapter_digest="x"), "made with other adapter"),
    "another rate": ("final_results", lambda r: r["adapter"].update(pass_at_1=0.9),
                     "adapter.pass_at_1 is 0.9, it should be 0.75, by the cells"),
    "another table": ("final_results", lambda r: r["by"]["difficulty"]["easy"]["base"].update(ungraded=0, correct=4),
                      "by.difficulty.easy.base.correct is 4"),
    "consistent counts that no cell has": ("final_results", better, "adapter.correct is 8, it should be 6"),
    "another p-value": ("final_results", lambda r: r["agreement"].update(mcnemar_p=0.001), "agreement.mcnemar_p"),
    "a better point": ("summary", lambda s: s["checkpoints"][0]["adapter"].update(pass_at_1=0.99),
                       "its checkpoint-2 does not come from checkpoint-2_results.json"),
    "no results at all": ("final_results", lambda r: r.pop("agreement"), "is no results file"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_figures_that_do_not_come_from_the_results_are_refused(run, tmp_path, capsys, name):
    file, change, message = SPOILED[name]
    edit(run / f"eval/{file}.json", change)
    assert export("--local-dir", tmp_path / "out", "--results", run / "eval/final_results.json") == 64
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_cells_the_rates_must_follow_from_the_counts(run, tmp_path, capsys):
    (run / "eval/cells.jsonl").unlink()
    assert export("--local-dir", tmp_path / "out") == 0
    edit(run / "eval/final_results.json", lambda r: r["adapter"].update(ci95=[0.7, 0.8]))
    assert export("--local-dir", tmp_path / "again") == 64
    assert "by its own counts" in capsys.readouterr().err


@pytest.mark.parametrize("old, new", [("0.750 [0.409", "0.950 [0.409"), ("value: 0.75", "value: 0.95"),
                                      ("model-index:", "model-index: [")])
def test_a_card_that_was_edited_is_not_pushed(run, tmp_path, capsys, old, new):
    assert export("--local-dir", tmp_path / "out") == 0
    readme = tmp_path / "out/README.md"
    edit(tmp_path / "out/export.json", lambda mark: mark.update(repo="me/name"))
    readme.write_text(readme.read_text().replace(old, new))
    assert export("--local-dir", tmp_path / "out", "--push", "me/name") == 64
    assert "README.md" in capsys.readouterr().err


def test_checkpoints_that_are_not_whole_and_used_folders_are_refused(run, tmp_path, capsys):
    folder, out = run / "checkpoints/checkpoint-4", tmp_path / "out"

    def refused(message: str, *arguments: object) -> None:
        assert export("--local-dir", out, *arguments) == 64
        assert message in capsys.readouterr().err
        assert not (out / "README.md").exists()

    refused("neither a folder nor owner/name", "--checkpoint", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    refused("it has no manifest.json, which is written last", "--checkpoint", tmp_path / "empty")
    out.mkdir()
    (out / "x").write_text("")
    refused("is not empty")
    (out / "x").unlink()
    (folder / "optimizer.pt").write_bytes(b"cut")
    refused("optimizer.pt is not what its manifest says", "--checkpoint", folder)
    refused("holds no whole checkpoint")
    (folder / "manifest.json").unlink()
    refused("it has no manifest.json", "--checkpoint", folder)


def test_merged_model_is_base_with_adapter_in_bf16(run, tmp_path, capsys):
    assert export("--local-dir", tmp_path / "out", "--merged") == 0
    assert "in bfloat16; mean |Δlogp| against base with adapter: 0.0" in capsys.readouterr().out
    merged = tmp_path / "out/merged"
    weights = load_file(merged / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    # each weight is the exact one, rounded once
    exact = dict(merging.merged_parameters(PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16), tmp_path / "out")))
    assert weights.keys() <= exact.keys() and all(torch.equal(weights[name], exact[name]) for name in weights)
    assert (json.loads((TINY / "config.json").read_text()).keys()
            <= json.loads((merged / "config.json").read_text()).keys()), "vLLM reads keys that transformers drops"


def test_a_merge_that_lost_the_adapter_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "merged_parameters", lambda model: iter(()))
    with pytest.raises(export_adapter.AdapterError, match="must not be published"):
        merging.merge({"pretrained_model_name_or_path": str(TINY)}, run / "checkpoints/checkpoint-4", tmp_path / "m")
