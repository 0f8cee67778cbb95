"""Base cells are the base: the check that evaluation makes before its first cell, on a real engine."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from policy_launch import start_cpu_server
from safetensors.torch import save_file
from transformers import Lfm2ForCausalLM

from recipe import eval_health, pristine
from recipe.config import Settings
from recipe.policy_client import PolicyClient, PolicyError

NAME = "opencode-lora"


def make_adapter(base: Path, folder: Path, seed: int, scale: float) -> Path:
    """An adapter whose B is random and not zero, as after training."""
    model = get_peft_model(Lfm2ForCausalLM.from_pretrained(base),
                           LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "w1"]))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=scale)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model_folder, tmp_path_factory) -> Path:
    return make_adapter(model_folder, tmp_path_factory.mktemp("adapter"), seed=1, scale=0.02)


@pytest.fixture(scope="module")
def client(model_folder, adapter) -> Iterator[PolicyClient]:
    """A fresh engine with the adapter loaded that also takes weight updates, as the training one does."""
    process, url = start_cpu_server(model_folder, "--max-model-len", "2048", "--dev-mode", "--enable-lora")
    try:
        client = PolicyClient(url)
        client.load_adapter(NAME, adapter)
        yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)
        process.stdout.close()


@pytest.fixture
def settings(model_folder) -> Settings:
    return Settings.load({"PRESET": "local", "MODEL": str(model_folder)})


def test_a_fresh_engine_passes_and_tells_base_from_adapter(settings, client, adapter):
    found = pristine.check(settings, client, adapter, NAME)
    assert found["base_against_files"] < 1e-5 and found["adapter_against_files"] < 1e-5
    assert found["adapter_against_base"] > found["tolerance"]


def test_an_engine_with_merged_weights_is_refused(settings, client, adapter, model_folder, tmp_path):
    """What the training server holds at the end of training: the merged weights, under the base's name."""
    merged = PeftModel.from_pretrained(Lfm2ForCausalLM.from_pretrained(model_folder), adapter).merge_and_unload()
    file = tmp_path / "merged.safetensors"
    save_file({name: tensor.detach().clone() for name, tensor in merged.named_parameters()}, file)
    update(client, file)
    try:
        with pytest.raises(pristine.NotPristine, match=r"server's base is not .*restart it with serve_policy.sh"):
            pristine.check(settings, client, adapter, NAME)
    finally:
        update(client, model_folder / "model.safetensors")


def update(client: PolicyClient, file: Path) -> None:
    for route, body in (("/start_weight_update", {"is_checkpoint_format": True}),
                        ("/update_weights", {"update_info": {"path": str(file)}}), ("/finish_weight_update", {})):
        requests.post(client.url + route, json=body, timeout=60).raise_for_status()


def test_another_adapter_under_the_name_is_refused(settings, client, adapter, model_folder, tmp_path):
    other = make_adapter(model_folder, tmp_path / "other", seed=2, scale=0.02)
    with pytest.raises(pristine.NotPristine, match="server's adapter is not"):
        pristine.check(settings, client, other, NAME)


def test_an_adapter_is_no_base(settings, client, adapter):
    wrong = Settings.load({"PRESET": "local", "MODEL": NAME})
    with pytest.raises(pristine.NotPristine, match="does not serve opencode-lora as a base"):
        pristine.check(wrong, client, adapter, NAME)


def test_adapters_come_and_go(client, adapter, settings):
    assert client.models()[NAME]["parent"] == settings.model
    client.load_adapter(NAME, adapter)  # replaces the one that is there
    client.unload_adapter(NAME)
    assert NAME not in client.models()
    with pytest.raises(PolicyError, match="404"):
        client.unload_adapter(NAME)
    client.load_adapter(NAME, adapter)


def test_what_an_evaluation_stands_on_is_looked_at_and_named(settings, client):
    policy = int(client.url.rsplit(":", 1)[1])
    living = dataclasses.replace(settings, policy_port=policy, env_port=9, public_port=10)
    with pytest.raises(PolicyError, match="http://127.0.0.1:9 does not answer /version"):
        PolicyClient("http://127.0.0.1:9", timeout=2).version()
    assert re.fullmatch(r"cpu [0-9a-f]{16}, torch \S+", client.version()), "cells are bound to the engine's code"
    found = eval_health.problem(living, looks=1)
    assert "the policy server" not in found and "the env server (see logs/env.log of the run folder) is down" in found
    assert "the route of the sandboxes to the capture proxy is down: http://127.0.0.1:10/capture/health" in found
