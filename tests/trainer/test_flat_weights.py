"""The flat buffer of the weight sync: packing, the engine's copies out of it, and the phases that surround them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch
from test_weight_sync import adapted, reference

from recipe import flat_weights, gpu_weight_transfer
from recipe.flat_weights import Receiver, from_json, pack, plan, size, to_json
from recipe.gpu_weight_transfer import FlatWeightTransfer, NcclWeightTransfer
from recipe.vllm_weights import FlatWeights, checksum
from recipe.weight_sync import WeightSyncError, merged_parameters

STACKED = {".q_proj.": (".qkv_proj.", 0), ".k_proj.": (".qkv_proj.", 1), ".v_proj.": (".qkv_proj.", 2),
           ".w1.": (".w13.", 0), ".w3.": (".w13.", 1)}


class Fused:
    """A model as vLLM holds it: q, k, v in one matrix, w1 and w3 in another, a vocabulary padded to 64 rows, conv
    kernels with one axis more, and a loader that copies slices, as vLLM's do."""

    def __init__(self, tensors, transposing: bool = False):
        self.transposing = transposing
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.places: dict[str, tuple[str, int]] = {}
        rows: dict[str, int] = {}
        for name, tensor in tensors:
            into = next((name.replace(a, b) for a, (b, _) in STACKED.items() if a in name), name)
            self.places[name] = (into, rows.get(into, 0))
            rows[into] = rows.get(into, 0) + tensor.shape[0]
            shape = (rows[into], *tensor.shape[1:])
            if "embed_tokens" in name:
                shape = (-(-shape[0] // 64) * 64, *shape[1:])
            self.parameters[into] = torch.nn.Parameter(torch.full(shape, float("nan"), dtype=tensor.dtype), False)
        self.loads = 0

    def load_weights(self, weights) -> None:
        self.loads += 1
        for name, weight in weights:
            into, row = self.places[name]
            if self.transposing and name.endswith("w2.weight"):
                weight = weight.t().contiguous().t()  # new memory: cannot be repeated as a copy out of the buffer
            self.parameters[into].data.narrow(0, row, weight.shape[0]).copy_(weight)

    def holds(self, tensors) -> bool:
        return all(torch.equal(self.parameters[self.places[name][0]].data.narrow(0, self.places[name][1],
                                                                                 tensor.shape[0]), tensor)
                   for name, tensor in tensors)


def flat_of(tensors):
    slots = plan(tensors)
    flat = torch.zeros(size(slots), dtype=torch.uint8)
    pack(flat, slots, tensors)
    return flat, slots


def test_packing_keeps_every_bit_and_aligns_every_tensor():
    tensors = [("a", torch.randn(3, 5)), ("b", torch.randn(7, dtype=torch.bfloat16)), ("c", torch.randn(2, 1, 3)),
               ("d", torch.randn(1000, 3, dtype=torch.bfloat16).t())]
    flat, slots = flat_of(tensors)
    assert all(slot.offset % flat_weights.ALIGN == 0 for slot in slots) and flat.numel() % flat_weights.ALIGN == 0
    assert from_json(json.loads(json.dumps(to_json(slots)))) == slots
    for (name, tensor), slot in zip(tensors, slots, strict=True):
        assert slot.name == name and torch.equal(slot.view(flat), tensor)
    with pytest.raises(ValueError, match="c .* came where .*'b'"):
        pack(flat, slots, [tensors[0], tensors[2], tensors[1], tensors[3]])
    with pytest.raises(ValueError, match="shorter"):
        pack(flat, slots, tensors[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_update_is_copies_alone_and_exact(dtype):
    model, original = adapted(dtype)
    tensors = list(merged_parameters(model))
    flat, slots = flat_of(tensors)
    engine = Fused(tensors)
    receiver = Receiver(flat, slots, engine.load_weights)
    first = receiver.apply()
    assert first["way"] == "loader" and engine.holds(tensors) and receiver.replays
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-2)
    changed = list(merged_parameters(model))
    assert not engine.holds(changed)
    pack(flat, slots, changed)
    second = receiver.apply()
    assert second["way"] == "copies" and second["copies"] == len(tensors) and engine.loads == 1
    assert engine.holds(changed)
    expected = reference(model, original)
    assert all(torch.equal(slot.view(flat), expected[slot.name]) for slot in slots)


def test_a_loader_that_does_more_than_copy_runs_every_time():
    tensors = list(merged_parameters(adapted(torch.bfloat16)[0]))
    flat, slots = flat_of(tensors)
    engine = Fused(tensors, transposing=True)
    receiver = Receiver(flat, slots, engine.load_weights)
    for number in (1, 2):
        report = receiver.apply()
        assert report["way"] == "loader" and engine.loads == number and engine.holds(tensors)
        assert report["missing"] and all(name.endswith("w2.weight") for name in report["missing"])
        flat.copy_(flat.roll(0))


def test_checksums_tell_apart_what_a_sum_does_not():
    a = torch.arange(64, dtype=torch.bfloat16).view(8, 8)
    assert checksum(a) == checksum(a.clone()) and checksum(a) != checksum(a.flip(0))
    assert checksum(a)[0] == checksum(a.flip(0))[0]


class Worker(FlatWeights):
    """vLLM's worker as far as the extension knows it, without a GPU."""

    def __init__(self, model):
        self.model = model
        self.parallel_config = SimpleNamespace(world_size=1)

    def flat_open(self, request: str) -> dict:
        """The trainer's buffer itself: here both are threads of one process."""
        self._flat_receiver = Receiver(self.shared, from_json(json.loads(request)["slots"]), self.model.load_weights)
        return {}


class Route(BaseHTTPRequestHandler):
    """/collective_rpc as vLLM has it, /pause, /resume and /health."""

    def do_GET(self):
        self.server.looks += 1
        if self.server.hangs == "/health":
            self.server.release.wait(60)
        self._answer({}, self.server.health)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        route = urlsplit(self.path).path
        self.server.calls.append(body.get("method") or route)
        if route == self.server.hangs:
            self.server.release.wait(60)
        if route != "/collective_rpc":
            return self._answer({"status": "ok"})
        self._answer({"results": [getattr(self.server.worker, body["method"])(*body["args"])]})

    def _answer(self, body, status=200):
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        pass


@pytest.fixture
def policy():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Route)
    server.calls, server.hangs, server.release = [], "", threading.Event()
    server.looks, server.health = 0, 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


class Shared(FlatWeightTransfer):
    """The transfer where both sides see the buffer anyway."""

    def __init__(self, server, timeout=30.0):
        super().__init__(f"http://127.0.0.1:{server.server_port}", timeout, torch.device("cpu"))
        self.server = server

    def _open(self, request):
        self.server.worker.shared = self.flat
        self._worker("flat_open", json.dumps(request))

    def _send(self):
        pass


def test_phases_and_what_is_between_pause_and_resume(policy):
    model, _ = adapted(torch.bfloat16)
    engine = Fused(list(merged_parameters(model)))
    policy.worker = Worker(engine)
    transfer = Shared(policy)
    transfer.init_weight_transfer()
    for _ in range(2):
        transfer.stage(merged_parameters(model))
        transfer.pause()
        transfer.send_weights(merged_parameters(model))
        transfer.resume()
    assert policy.calls == ["flat_open", "/pause", "flat_apply", "/resume", "/pause", "flat_apply", "/resume"]
    assert engine.holds(list(merged_parameters(model))) and transfer.applied["way"] == "copies"
    assert {"pack", "stage", "pause", "flat_apply", "resume"} <= transfer.timings.keys()
    transfer.pause()
    transfer.send_weights(merged_parameters(model))  # a caller that knows TRL's protocol alone
    transfer.resume()
    assert policy.calls[-3:] == ["/pause", "flat_apply", "/resume"]
    transfer.destroy()
    assert transfer.flat is None


def test_a_failure_in_the_worker_and_an_engine_that_hangs_are_named(policy):
    model, _ = adapted(torch.bfloat16)
    engine = Fused(list(merged_parameters(model)))
    policy.worker = Worker(engine)
    engine.load_weights = lambda weights: (_ for _ in ()).throw(RuntimeError("CUDA out of memory"))
    transfer = Shared(policy)
    with pytest.raises(WeightSyncError, match="flat_apply .*RuntimeError: CUDA out of memory.*policy.log"):
        transfer.send_weights(merged_parameters(model))
    policy.hangs = "/pause"
    with pytest.raises(WeightSyncError, match="POST /pause .*failed after .*timed out"):
        Shared(policy, timeout=0.5).pause()


def test_an_engine_over_several_gpus_is_refused():
    worker = Worker(None)
    worker.parallel_config.world_size = 2
    assert "2 workers: set WEIGHT_SYNC=stock" in FlatWeights.flat_open(worker, "{}")["error"]


def lost() -> bool:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(("event", "said"), [
    (lambda: False, "not received within 0.2 s by the policy server at http://engine: it died or hangs"),
    (lost, "broadcast of the weights to the policy server at http://engine failed: CUDA error"),
])
def test_a_broadcast_that_nobody_takes_ends_with_a_message(monkeypatch, event, said):
    """NCCL has no timeout; CUDA reports the lost memory of the other process as a RuntimeError, or never answers."""
    transfer, left = broadcasting("http://engine", 60 if event is lost else 0.2, monkeypatch, event)
    with pytest.raises(WeightSyncError, match=said):
        transfer._send()
    assert left == ["the group"], "what nobody takes would hold the process at its end"


def broadcasting(url, timeout, monkeypatch, event=lambda: False):
    """A transfer whose broadcast has ended when `event` says so, and who has left what."""
    left = []
    transfer = NcclWeightTransfer(url, timeout, torch.device("cpu"))
    transfer.flat, transfer.stream = torch.zeros(8, dtype=torch.uint8), None
    transfer.group = SimpleNamespace(destroy=lambda: left.append("the group"))
    transfer.sent = SimpleNamespace(record=lambda stream: None, query=event)
    monkeypatch.setattr(transfer, "_worker", lambda method: {})
    monkeypatch.setattr(gpu_weight_transfer, "receive", lambda *_: None)
    return transfer, left


def test_a_broadcast_whose_receiver_is_gone_does_not_wait_for_the_time_limit(policy, monkeypatch):
    monkeypatch.setattr(gpu_weight_transfer, "LOOK", 0.02)
    url = f"http://127.0.0.1:{policy.server_port}"
    transfer, left = broadcasting(url, 3600, monkeypatch, lambda: policy.looks > 3)
    transfer._send()
    assert not left, "a server that answers may be receiving"
    monkeypatch.setattr(gpu_weight_transfer, "ANSWER", 0.05)
    policy.hangs = "/health"
    with pytest.raises(WeightSyncError, match="not received within 0.5 s"):  # busy, or hangs: the time decides
        broadcasting(url, 0.5, monkeypatch)[0]._send()
    monkeypatch.undo()
    monkeypatch.setattr(gpu_weight_transfer, "LOOK", 0.02)
    policy.hangs, policy.health = "", 503  # vLLM's when its engine is dead
    for there, said in ((url, "it answers 503 to GET /health"), ("http://127.0.0.1:9", "it is gone")):
        transfer, left = broadcasting(there, 3600, monkeypatch)
        with pytest.raises(WeightSyncError, match=f"not received by .*: {said}"):
            transfer._send()
        assert left == ["the group"]
