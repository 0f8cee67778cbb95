"""Pausing, new weights and adapters: vLLM's control routes, with weights by file where the server takes them so."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import requests
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from policy_fixture import make_model
from safetensors.torch import save_file
from test_policy_server import error_of
from transformers import Lfm2ForCausalLM

from recipe.canary import KEPT_LENGTH, kept_prompt
from recipe.policy_client import PolicyClient

IDS = [1, 6, *range(30, 180)]


def reference_logprobs(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Log-probs of ids[1:] by transformers' (or PEFT's) own forward."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).tolist()


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, f"not within 300 s: {what}"
        time.sleep(0.02)


# -- pausing ----------------------------------------------------------------------------------------------------------
def test_info_that_trl_reads(dev_server):
    assert dev_server.get("/get_world_size").json()["world_size"] >= 1
    config = dev_server.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"]["dtype"] in ("torch.float32", "torch.bfloat16")
    assert "lora_config" in config


def test_requests_wait_while_paused_and_finish_after_resume(dev_server):
    answers = []
    assert dev_server.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
    assert dev_server.get("/is_paused").json() == {"is_paused": True}
    request = threading.Thread(target=lambda: answers.append(dev_server.chat(max_tokens=3)))
    request.start()
    request.join(0.5)
    assert request.is_alive() and not answers
    assert dev_server.post("/resume").json() == {"status": "resumed"}
    request.join(300)
    assert answers and dev_server.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_other_pause_modes_return(dev_server, mode):
    assert dev_server.post("/pause", params={"mode": mode}).status_code == 200
    assert dev_server.post("/resume").status_code == 200
    assert dev_server.chat(max_tokens=2)["choices"]


def test_a_pause_drops_what_was_kept_of_a_prompt(dev_server):
    client, prompt = PolicyClient(dev_server.url), kept_prompt(IDS)
    client.next_token(dev_server.model, prompt)
    before, kept = client.next_token(dev_server.model, prompt)
    if not kept and not dev_server.is_ours:
        pytest.skip("the server at POLICY_URL keeps no prefixes")
    assert kept >= KEPT_LENGTH // 2
    dev_server.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    dev_server.post("/resume")
    assert client.next_token(dev_server.model, prompt)[1] == kept
    dev_server.post("/pause", params={"mode": "keep"})
    dev_server.post("/resume")
    after, kept = client.next_token(dev_server.model, prompt)
    assert kept == 0 and max(before.values()) == pytest.approx(max(after.values()), abs=0.1)


def test_unknown_pause_mode(dev_server):
    error_of(dev_server.post("/pause", params={"mode": "maybe"}), 400)
    assert dev_server.get("/is_paused").json() == {"is_paused": False}


@pytest.fixture
def file_server(dev_server):
    """A server that takes weights by file, on the fixture's model; it has its own weights again afterwards."""
    if not dev_server.is_ours:
        pytest.skip("vLLM takes weights by NCCL, from a trainer on a GPU")
    yield dev_server
    dev_server.post("/finish_weight_update")  # ends an update that a failed test left open
    update(dev_server, dev_server.folder / "model.safetensors")


def update(server, path: Path) -> None:
    for route, body in (("/start_weight_update", {"is_checkpoint_format": True}),
                        ("/update_weights", {"update_info": {"path": str(path)}}), ("/finish_weight_update", None)):
        response = server.post(route, body)
        assert response.status_code == 200, response.text


def test_an_aborted_client_frees_its_slot(file_server):
    def load() -> dict:
        return file_server.get("/server_info?config_format=json").json()["system_env"]

    body = {"model": file_server.model, "prompt": IDS, "max_tokens": 1800, "ignore_eos": True}
    with pytest.raises(requests.ReadTimeout):
        requests.post(file_server.url + "/v1/completions", json=body, timeout=0.2)
    wait_until(lambda: load()["running"] == load()["waiting"] == 0, "the slot of a client that went away is free")
    file_server.post("/pause", params={"mode": "keep"})
    with pytest.raises(requests.ReadTimeout):
        requests.post(file_server.url + "/v1/completions", json=body, timeout=0.2)
    wait_until(lambda: load()["waiting"] == 0, "a waiting request of a client that went away is dropped")


# -- new weights ------------------------------------------------------------------------------------------------------
def test_new_weights_by_file_replace_the_policy(file_server, tmp_path):
    before = file_server.prompt_logprobs(IDS)
    old = reference_logprobs(Lfm2ForCausalLM.from_pretrained(file_server.folder).eval(), IDS)
    assert before == pytest.approx(old, abs=1e-4)
    warm = file_server.chat("x" * 600, seed=1, return_token_ids=True, ignore_eos=True)  # fills the prefix cache
    trained = Lfm2ForCausalLM.from_pretrained(make_model(tmp_path / "other", seed=1)).eval()
    weights = tmp_path / "sync.safetensors"
    save_file({name: tensor.detach().clone() for name, tensor in trained.named_parameters()}, weights)
    file_server.post("/pause", params={"mode": "keep"})
    update(file_server, weights)
    weights.unlink()
    file_server.post("/resume")
    after = file_server.prompt_logprobs(IDS)
    assert after == pytest.approx(reference_logprobs(trained, IDS), abs=1e-4)
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 0.1
    # The prompt's blocks were computed by the old weights: they must not serve the new ones.
    again = file_server.chat("x" * 600, seed=1, return_token_ids=True, ignore_eos=True, logprobs=True)
    assert again["prompt_token_ids"] == warm["prompt_token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    choice = again["choices"][0]
    logprobs = reference_logprobs(trained, again["prompt_token_ids"] + choice["token_ids"])
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == pytest.approx(
        logprobs[-len(choice["token_ids"]):], abs=1e-4)


def test_some_parameters_may_be_updated_alone(file_server, tmp_path):
    model = Lfm2ForCausalLM.from_pretrained(file_server.folder).eval()
    name, tensor = "model.layers.1.self_attn.q_proj.weight", model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        tensor.add_(torch.ones_like(tensor), alpha=0.05)
    save_file({name: tensor.detach().clone()}, tmp_path / "part.safetensors")
    update(file_server, tmp_path / "part.safetensors")
    assert file_server.prompt_logprobs(IDS) == pytest.approx(reference_logprobs(model, IDS), abs=1e-4)


def test_the_clients_that_training_uses(file_server, tmp_path):
    """TRL's own client and the recipe's file transfer, unchanged, against the server."""
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    from recipe.weight_sync import FileWeightTransfer

    PartialState()  # accelerate's logger, which the client uses, wants it
    client = VLLMClient(file_server.url)
    client.wait_for_server_ready()
    assert (client.get_max_model_len(), client.get_dtype(), client.get_world_size()) == (2048, "torch.float32", 1)
    model = Lfm2ForCausalLM.from_pretrained(make_model(tmp_path / "trained", seed=2)).eval()
    transfer = FileWeightTransfer(file_server.url, tmp_path / "weights")
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(model.named_parameters()))
    transfer.resume()
    transfer.destroy()
    assert file_server.prompt_logprobs(IDS) == pytest.approx(reference_logprobs(model, IDS), abs=1e-4)


@pytest.mark.parametrize("tensors, named", [
    ({"model.layers.0.no_such.weight": torch.zeros(2)}, "no_such"),
    ({"model.embedding_norm.weight": torch.zeros(3)}, "embedding_norm"),
    (None, "missing.safetensors")])
def test_weights_that_do_not_fit_change_nothing(file_server, tmp_path, tensors, named):
    before, path = file_server.prompt_logprobs(IDS), tmp_path / "missing.safetensors"
    if tensors is not None:
        save_file(tensors, path)
    assert file_server.post("/start_weight_update").status_code == 200
    error = error_of(file_server.post("/update_weights", {"update_info": {"path": str(path)}}), 500)
    assert named in error["message"]
    assert file_server.post("/finish_weight_update").status_code == 200
    assert file_server.prompt_logprobs(IDS) == before


def test_phases_out_of_order(file_server):
    error_of(file_server.post("/finish_weight_update"), 500)
    error_of(file_server.post("/update_weights", {"update_info": {"path": "x"}}), 500)
    assert file_server.post("/start_weight_update").status_code == 200
    error_of(file_server.post("/start_weight_update"), 500)
    assert file_server.post("/finish_weight_update").status_code == 200
    error_of(file_server.post("/update_weights", {"info": {}}), 400)


# -- adapters ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def adapter_server(server):
    """A server that loads adapters at run time; loaded ones are gone afterwards."""
    probe = server.post("/v1/unload_lora_adapter", {"lora_name": "never-loaded"})
    if probe.json().get("error", {}).get("type") != "NotFoundError":
        assert not server.is_ours
        pytest.skip("the server at POLICY_URL runs without --enable-lora or VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
    yield server
    for model in server.get("/v1/models").json()["data"]:
        if model["parent"]:
            server.post("/v1/unload_lora_adapter", {"lora_name": model["id"]})


def make_adapter(base: Path, folder: Path, rank: int = 4, **changes) -> Path:
    model = get_peft_model(Lfm2ForCausalLM.from_pretrained(base), LoraConfig(
        r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "out_proj", "w1", "w2", "w3", "in_proj"], **changes))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def test_adapter_is_served_beside_an_untouched_base(adapter_server, tmp_path):
    if not adapter_server.is_ours:
        pytest.skip("an adapter for the server's model is not at hand")
    folder = make_adapter(adapter_server.folder, tmp_path / "adapter")
    before = adapter_server.prompt_logprobs(IDS)
    body = {"lora_name": "tuned", "lora_path": str(folder)}
    response = adapter_server.post("/v1/load_lora_adapter", body)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'tuned' added successfully.")
    cards = {m["id"]: m for m in adapter_server.get("/v1/models").json()["data"]}
    assert cards["tuned"]["parent"] == adapter_server.model

    peft = PeftModel.from_pretrained(Lfm2ForCausalLM.from_pretrained(adapter_server.folder), str(folder)).eval()
    assert adapter_server.prompt_logprobs(IDS, "tuned") == pytest.approx(reference_logprobs(peft, IDS), abs=1e-4)
    assert adapter_server.prompt_logprobs(IDS) == before
    # The same prompt under both names, twice: neither may start from the other's prefix blocks.
    fields = {"return_token_ids": True, "logprobs": True, "seed": 2, "ignore_eos": True}
    for model, reference in (("tuned", peft), (adapter_server.model, peft.get_base_model())) * 2:
        answer = adapter_server.chat("y" * 300, model=model, **fields)
        assert answer["model"] == model
        tokens = answer["choices"][0]["token_ids"]
        ids = answer["prompt_token_ids"] + tokens
        with peft.disable_adapter() if model != "tuned" else torch.no_grad():
            expected = reference_logprobs(reference, ids)[-len(tokens):]
        assert [e["logprob"] for e in answer["choices"][0]["logprobs"]["content"]] == pytest.approx(expected, abs=1e-4)

    error_of(adapter_server.post("/v1/load_lora_adapter", body), 400)
    assert adapter_server.post("/v1/load_lora_adapter", {**body, "load_inplace": True}).status_code == 200
    response = adapter_server.post("/v1/unload_lora_adapter", {"lora_name": "tuned"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'tuned' removed successfully.")
    chat = {"model": "tuned", "messages": [{"role": "user", "content": "hi"}]}
    error_of(adapter_server.post("/v1/chat/completions", chat), 404)


def test_adapter_refusals(adapter_server, tmp_path):
    def load(name: str, path: str) -> requests.Response:
        return adapter_server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    assert error_of(load("a", str(tmp_path / "nothing-here")), 404)["type"] == "NotFoundError"
    # vLLM 0.26 does not look at the name first and finds no adapter in the folder
    old = adapter_server.get("/version").json()["version"].startswith("0.26.")
    error = error_of(load(adapter_server.model, str(tmp_path)), 404 if old else 400)
    assert error["type"] == ("NotFoundError" if old else "InvalidUserInput")
    assert error_of(load("", str(tmp_path)), 400)["type"] == "InvalidUserInput"
    error_of(adapter_server.post("/v1/load_lora_adapter", {"lora_name": "a"}), 400)
    error_of(adapter_server.post("/v1/unload_lora_adapter", {"lora_name": "a"}), 404)


@pytest.mark.parametrize("changes, named", [({"rank": 64}, "max_lora_rank"), ({"use_dora": True}, "use_dora"),
                                            ({"modules_to_save": ["embedding_norm"]}, "modules_to_save")])
def test_adapters_that_vllm_does_not_serve_either(adapter_server, tmp_path, changes, named):
    if not adapter_server.is_ours:
        pytest.skip("an adapter for the server's model is not at hand")
    folder = make_adapter(adapter_server.folder, tmp_path / "adapter", **changes)
    response = adapter_server.post("/v1/load_lora_adapter", {"lora_name": "odd", "lora_path": str(folder)})
    assert named in error_of(response, 500)["message"]
    assert "odd" not in {m["id"] for m in adapter_server.get("/v1/models").json()["data"]}
