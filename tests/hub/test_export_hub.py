"""Checkpoints of a repository, exported and published: the Hub's own check of the card, refusals, outages."""

from __future__ import annotations

import dataclasses
import json

import httpx
import huggingface_hub
import pytest
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import _http

import export_adapter
from recipe import checkpoints, model_card, report
from recipe import hub as recipe_hub
from recipe.adapters import adapter_digest
from recipe.config import Settings

REPO, PUBLISHED = "me/adapter", "me/published"
HELD_OUT = "FineEnvs/SmolDataEnvs-harbor-test@b130595b579fc6026ad5762925a9a3b40e72f5bb"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(recipe_hub, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(recipe_hub, "ATTEMPTS", 3)


@pytest.fixture
def repo(hub, tmp_path):
    """checkpoint-300 as the trainer pushes it, and its evaluation."""
    settings = dataclasses.replace(Settings.load({}), run_dir=str(tmp_path / "run"))
    folder = tmp_path / "run/checkpoints/checkpoint-300"
    folder.mkdir(parents=True)
    config = {"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "w1"], "peft_type": "LORA"}
    for name, content in {"adapter_config.json": json.dumps(config).encode(), "tokenizer.json": b"{}",
                          "adapter_model.safetensors": b"weights" * 2000, "optimizer.pt": b"state" * 2000}.items():
        (folder / name).write_bytes(content)
    checkpoints.seal(folder, settings)
    cells = [{"task": f"t{i}", "status": "correct" if i < 3 else "wrong", "tool_calls": 1, "tokens": 5,
              "difficulty": "easy"} for i in range(10)]
    result = report.compare(cells, cells) | {"adapter_digest": adapter_digest(folder), "adapter_name": "adapter",
                                             "tasks": 10, "tasks_source": HELD_OUT, "time": 1.0}
    made = hub.repo(REPO)
    made.add("checkpoint-300", {f"checkpoint-300/{p.name}": p.read_bytes() for p in folder.iterdir()})
    made.add("evaluation", {"eval/checkpoint-300_final_results.json": json.dumps(result).encode()})
    return made


def export(*arguments: object) -> int:
    return export_adapter.main([str(argument) for argument in arguments])


@pytest.fixture
def hub_at_its_own_name(hub):
    """ModelCard.validate asks https://huggingface.co whatever the endpoint: that name leads to the double."""
    class ToDouble(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == "huggingface.co":
                double = httpx.URL(hub.url)
                request.url = request.url.copy_with(scheme=double.scheme, host=double.host, port=double.port)
            return super().handle_request(request)

    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=ToDouble()))
    yield
    huggingface_hub.set_client_factory(_http.default_client_factory)


def test_a_checkpoint_of_a_repository_is_published_with_a_valid_card(hub, repo, tmp_path, hub_at_its_own_name):
    out = tmp_path / "out"
    assert export("--checkpoint", f"{REPO}/checkpoint-300@{repo.commits[-2].sha}", "--local-dir", out,
                  "--push", PUBLISHED) == 0
    assert hub.count("GET .*optimizer.pt") == 0
    files = hub.repo(PUBLISHED).files()
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
                            "eval/checkpoint-300_final_results.json"}
    assert hub.repo(PUBLISHED).private, "who wants it public says so on the Hub"
    card = ModelCard(files["README.md"].decode())
    before = hub.count("POST /api/validate-yaml")
    card.validate()
    assert hub.count("POST /api/validate-yaml") == before + 1 > 1
    # what the Hub parses of it is what was meant
    parsed = ModelCardData(**card.data.to_dict())
    assert parsed.model_name == "published" and parsed.base_model == "LiquidAI/LFM2.5-2.6B"
    (entry,) = parsed.eval_results
    assert (entry.dataset_type, entry.dataset_revision) == tuple(HELD_OUT.split("@"))
    assert (entry.metric_type, entry.metric_value) == ("pass@1", 0.3)
    assert f'PeftModel.from_pretrained(base, "{PUBLISHED}")' in card.text
    assert f"--max-lora-rank 32 --lora-modules opencode-lora={PUBLISHED}" in card.text


def test_the_card_of_a_local_base_is_valid_too(hub, hub_at_its_own_name):
    facts = model_card.Facts(step=3, training={"model": "mine"}, repo=PUBLISHED,
                             config={"r": 8, "target_modules": ["w1"]})
    card = ModelCard(model_card.render(facts))
    card.validate()
    assert hub.count("POST /api/validate-yaml") == 1 and "local model that is not on the Hub" in card.text


@pytest.mark.parametrize("old, new, message", [
    ("license_name: lfm1.0", "license_name: LFM 1.0", "license_name"),
    ("base_model: LiquidAI/LFM2.5-2.6B", "base_model: /models/lfm", "base_model"),
    ("      type: text-generation", "      kind: text-generation", "Invalid `model_index`|task"),
    ("tags:\n- lora", "tags:\n- 1.5", "tags")])
def test_the_hubs_check_can_fail(hub, repo, tmp_path, hub_at_its_own_name, capsys, old, new, message):
    """Else that it passes means nothing. What the Hub refuses is told in one sentence and is not tried again."""
    out = tmp_path / "out"
    assert export("--checkpoint", f"{REPO}/checkpoint-300", "--local-dir", out) == 0
    text = (out / "README.md").read_text()
    assert old in text
    (out / "README.md").write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        ModelCard(text.replace(old, new)).validate()
    mark = json.loads((out / "export.json").read_text()) | {"repo": PUBLISHED}
    (out / "export.json").write_text(json.dumps(mark))
    assert export("--checkpoint", f"{REPO}/checkpoint-300", "--local-dir", out, "--push", PUBLISHED) == 64
    assert capsys.readouterr().err.startswith("not exported: ")
    assert hub.count(f"/api/models/{PUBLISHED}/commit/") == 0 and hub.count("/api/repos/create") <= 1


def test_an_outage_keeps_the_folder_and_the_same_command_goes_on(hub, repo, tmp_path, capsys):
    outage = hub.fail(100, 503, f"/{PUBLISHED}/commit/")
    command = ("--checkpoint", f"{REPO}/checkpoint-300", "--local-dir", tmp_path / "out", "--push", PUBLISHED)
    assert export(*command) == 69
    assert "the same command pushes it again" in capsys.readouterr().err
    outage.times = 0
    assert export(*command) == 0
    assert "README.md" in hub.repo(PUBLISHED).files() and "wrote" not in capsys.readouterr().out


def test_half_pushed_and_unnamed_checkpoints_are_refused(hub, repo, tmp_path, capsys):
    def refused(name: str, message: str) -> None:
        assert export("--checkpoint", name, "--local-dir", tmp_path / "out") == 64
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()

    refused(REPO, "name one, for example me/adapter/checkpoint-300")
    refused(f"{REPO}/checkpoint-7", "is not a whole checkpoint: it was not written to its end")
    repo.add("damaged", {"checkpoint-300/adapter_model.safetensors": b"other"})
    refused(f"{REPO}/checkpoint-300", "adapter_model.safetensors is not what its manifest says")
    repo.add("half", {"checkpoint-400/adapter_model.safetensors": b"x", "checkpoint-400/adapter_config.json": b"{}"})
    refused(f"{REPO}/checkpoint-400", "it was not written to its end")
