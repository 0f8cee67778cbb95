"""Exported adapters: the card says what the results say, and the merged model is base with adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import export_adapter
from recipe import pristine, report
from recipe.adapters import AdapterError
from recipe.config import REPO, Settings
from recipe.evaluation import adapter_digest

TINY = REPO / "tiny" / "model"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "w1"], init_lora_weights=False))
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings.load({"PRESET": "local", "RUN_DIR": str(tmp_path / "run"), "ADAPTER_REPO": "you/my-lora"})


def write_results(file: Path, adapter: Path, correct: int = 6) -> Path:
    def cells(good: int) -> list[dict]:
        return [{"task": f"t{i}", "status": "correct" if i < good else "wrong", "tool_calls": 2, "tokens": 9}
                for i in range(8)]

    result = report.compare(cells(3), cells(correct)) | {"adapter_digest": adapter_digest(adapter), "tasks": 8}
    file.write_text(json.dumps(result))
    return file


def test_card_and_files(settings, adapter, tmp_path):
    out = export_adapter.export(settings, adapter, write_results(tmp_path / "r.json", adapter), tmp_path / "out")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {p.name for p in out.iterdir()}
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.license, card.data.license_name) == ("peft", "other", "lfm1.0")
    assert card.data.eval_results[0].metric_value == 0.75
    assert "0.750 [0.409, 0.929]" in card.text and "--max-lora-rank 8 " in card.text and "you/my-lora" in card.text
    assert (out / "eval" / "r.json").exists()
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), out)


def test_a_card_without_results_claims_nothing(settings, adapter, tmp_path):
    out = export_adapter.export(settings, adapter, None, tmp_path / "out")
    card = ModelCard.load(out / "README.md")
    assert "was not evaluated" in card.text and not card.data.eval_results


def test_a_hub_base_is_named_in_the_metadata(adapter, tmp_path):
    out = export_adapter.export(Settings.load({}), adapter, None, tmp_path / "out")
    assert ModelCard.load(out / "README.md").data.base_model == "LiquidAI/LFM2.5-2.6B"


def test_results_of_other_weights_are_refused(settings, adapter, tmp_path):
    other = shutil.copytree(adapter, tmp_path / "other")
    (other / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(AdapterError, match="made with other adapter weights"):
        export_adapter.export(settings, adapter, write_results(tmp_path / "r.json", other), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_incomplete_checkpoints_and_used_folders_are_refused(settings, adapter, tmp_path):
    with pytest.raises(AdapterError, match="lacks adapter_config.json"):
        export_adapter.export(settings, tmp_path, None, tmp_path / "out")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("")
    with pytest.raises(AdapterError, match="not empty"):
        export_adapter.export(settings, adapter, None, tmp_path / "used")


def test_merged_model_is_base_with_adapter(settings, adapter, tmp_path):
    off = export_adapter.merge(settings, adapter, tmp_path / "merged")
    assert off < 1e-4
    ids, base, expected = pristine.reference_logprobs(settings, adapter)
    merged = pristine.logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), ids)
    assert pristine.distance(merged, expected) < 1e-4 < pristine.distance(merged, base)
    original = json.loads((TINY / "config.json").read_text())
    assert original.keys() <= json.loads((tmp_path / "merged" / "config.json").read_text()).keys()
