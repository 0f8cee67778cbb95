"""What is streamed to the engine, and its way there as a file."""

from __future__ import annotations

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import torch
from lfm2_small import fill_adapter, small_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params

from recipe.config import Settings
from recipe.lfm2 import lora_config
from recipe.weight_sync import FileWeightTransfer, WeightSyncError, merged_parameters, transfer_of

DTYPES = [torch.float32, torch.bfloat16]


def adapted(dtype: torch.dtype):
    """A PEFT model whose adapter changes every target, and the base as it was."""
    base = small_model().to(dtype)
    original = copy.deepcopy(base.state_dict())
    model = get_peft_model(base, lora_config(Settings.load({"LORA_R": "8", "LORA_ALPHA": "24"})))
    fill_adapter(model, seed=3)
    return model, original


def reference(model, original: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """base + alpha / r * B @ A in fp32, rounded once, from the adapter's tensors alone."""
    lora = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
    out = {}
    for name, weight in original.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        a, b = (lora.get(f"{stem}.lora_{x}.default.weight") for x in "AB")
        out[name] = weight if a is None else (weight.float() + 24 / 8 * (b.float() @ a.float())).to(weight.dtype)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_stream_is_base_plus_scaled_update_and_leaves_the_base_alone(dtype):
    model, original = adapted(dtype)
    expected = reference(model, original)
    for _ in range(20):
        streamed = dict(merged_parameters(model))
    # lm_head is tied to the embedding: the engine gets it once, under the embedding's name
    assert set(streamed) == set(original) - {"lm_head.weight"}
    for name, tensor in streamed.items():
        assert tensor.dtype == dtype and torch.equal(tensor, expected[name]), name
    changed = [name for name, tensor in streamed.items() if not torch.equal(tensor, original[name])]
    assert len(changed) == 2 * 4 + 4 * 3  # q, k, v, out_proj of two layers, w1, w2, w3 of four
    for name, tensor in model.get_base_model().state_dict().items():
        plain = name.replace(".base_layer", "")
        if "lora_" not in name:
            assert torch.equal(tensor, original[plain]), f"{plain} moved"


def thousand_syncs(dtype: torch.dtype, stock: bool) -> tuple[float, float]:
    """Share of the adapted base weights that have moved after 1,000 syncs, and their relative RMS drift.

    The adapter changes a little before each sync; what is streamed is compared with the reference now and then.
    """
    base = small_model(num_hidden_layers=1, layer_types=["full_attention"]).to(dtype)
    original = copy.deepcopy(base.state_dict())
    model = get_peft_model(base, lora_config(Settings.load({"LORA_R": "8", "LORA_ALPHA": "24"})))
    generator = torch.Generator().manual_seed(3)
    lora_b = [p for name, p in model.named_parameters() if "lora_B" in name]
    for sync in range(1000):
        with torch.no_grad():
            for parameter in lora_b:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
        if stock:
            model.merge_adapter()
            model.unmerge_adapter()
        else:
            streamed = dict(merged_parameters(model))
            if sync % 250 == 249:
                expected = reference(model, original)
                assert all(torch.equal(tensor, expected[name]) for name, tensor in streamed.items())
    kept = {name.replace(".base_layer", ""): tensor for name, tensor in model.get_base_model().state_dict().items()
            if "lora_" not in name}
    assert kept.keys() == original.keys()
    adapted_names = [n.replace(".base_layer", "") for n in model.get_base_model().state_dict() if ".base_layer." in n]
    before, after = (torch.cat([w[n].float().flatten() for n in adapted_names]) for w in (original, kept))
    assert all(torch.equal(kept[n], original[n]) for n in kept.keys() - set(adapted_names))
    return float((before != after).float().mean()), float((after - before).norm() / before.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_is_bit_identical_after_a_thousand_syncs(dtype):
    assert thousand_syncs(dtype, stock=False) == (0, 0)


@pytest.mark.parametrize(("dtype", "moved", "drift"), [(torch.float32, 0.2, 1e-8), (torch.bfloat16, 0.2, 1e-3)])
def test_trls_own_way_moves_the_base(dtype, moved, drift):
    """Why the stream exists: merging and unmerging rounds in the base's own dtype, a thousand times."""
    found = thousand_syncs(dtype, stock=True)
    assert found[0] > moved and found[1] > drift


def test_stream_follows_trls_manifest():
    model, _ = adapted(torch.float32)
    manifest = [(name, p.shape, p.dtype) for name, p in _iter_vllm_named_params(model)]
    assert [(name, t.shape, t.dtype) for name, t in merged_parameters(model)] == manifest


def test_an_adapter_that_is_not_plain_lora_is_refused():
    model = get_peft_model(small_model(), LoraConfig(target_modules=["w1"], use_dora=True))
    with pytest.raises(TypeError, match="DoRA"):
        dict(merged_parameters(model))
    for target in ("embed_tokens", "conv.conv"):  # adapted, and no linear layer: the base alone would be sent
        model = get_peft_model(small_model(), LoraConfig(r=32, target_modules=["q_proj", target]))
        with pytest.raises(TypeError, match="LoRA on a linear layer"):
            dict(merged_parameters(model))


class Engine(BaseHTTPRequestHandler):
    """A policy server that records the calls and loads the file, or answers `fail` with a 500."""

    def do_GET(self):
        self._answer()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(json.loads(body) if body else None)

    def _answer(self, body=None):
        route = urlsplit(self.path).path
        self.server.calls.append((self.command, self.path, body))
        if route == "/update_weights":
            self.server.weights = load_file(body["update_info"]["path"])
        status = 500 if route == self.server.fail else 200
        payload = b'{"error": "out of memory"}' if status == 500 else json.dumps(self.server.info).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        pass


@pytest.fixture
def engine():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.calls, server.weights, server.fail, server.info = [], {}, "", {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def url(server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_file_transfer_delivers_the_merged_weights(engine, tmp_path):
    model, original = adapted(torch.bfloat16)
    transfer = FileWeightTransfer(url(engine), tmp_path / "weights")
    transfer.init_weight_transfer()
    for _ in range(2):
        transfer.pause()
        transfer.send_weights(merged_parameters(model))
        transfer.resume()
    expected = reference(model, original)
    expected.pop("lm_head.weight")
    assert engine.weights.keys() == expected.keys()
    assert all(torch.equal(engine.weights[name], expected[name]) for name in expected)
    one_sync = ["/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    assert [path for _, path, _ in engine.calls] == ["/health", *one_sync, *one_sync]
    assert ("POST", "/start_weight_update", {"is_checkpoint_format": True}) in engine.calls
    assert not any((tmp_path / "weights").iterdir()), "the file of a finished sync stays behind"
    transfer.destroy()
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("route", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
                                   "/resume", "/health"])
def test_a_phase_that_fails_is_named_with_the_servers_answer(engine, tmp_path, route):
    engine.fail = route
    transfer = FileWeightTransfer(url(engine), tmp_path / "weights")
    with pytest.raises(WeightSyncError, match=rf"{route} .*500.*out of memory"):
        transfer.init_weight_transfer()
        transfer.pause()
        transfer.send_weights(merged_parameters(small_model()))
        transfer.resume()
    assert not any((tmp_path / "weights").iterdir())


def test_a_server_that_is_gone_is_named(tmp_path):
    with pytest.raises(WeightSyncError, match="GET /health of the policy server at http://127.0.0.1:9 failed"):
        FileWeightTransfer("http://127.0.0.1:9", tmp_path).init_weight_transfer()


def test_the_server_says_how_it_takes_weights(engine, tmp_path):
    def served(backend, lora=None):
        engine.info = {"vllm_config": {"lora_config": lora, "weight_transfer_config": backend and {"backend": backend}}}

    served("file")
    assert isinstance(transfer_of(url(engine), tmp_path), FileWeightTransfer)
    served("nccl")
    assert transfer_of(url(engine), tmp_path) is None
    for wrong in ((None,), ("ipc",), ("nccl", {"max_lora_rank": 32})):
        served(*wrong)
        with pytest.raises(WeightSyncError, match="takes no merged weights.*--mode train"):
            transfer_of(url(engine), tmp_path)
    engine.fail = "/server_info"
    with pytest.raises(WeightSyncError, match="500.*--mode train"):
        transfer_of(url(engine), tmp_path)
