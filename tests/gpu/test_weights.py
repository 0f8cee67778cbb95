"""What the engine holds: after a sync by CUDA IPC or NCCL the merged weights bit for bit; an adapter and its base."""

from __future__ import annotations

import contextlib
import time

import pytest
from transformers import AutoTokenizer

from bench.model import TINY
from bench.weight_sync import InFlight, load_policy, nudge, ours, wrong_parameters
from recipe import canary, pristine
from recipe.config import Settings
from recipe.gpu_weight_transfer import IpcWeightTransfer, NcclWeightTransfer, flat_transfer
from recipe.policy_client import PolicyClient
from recipe.weight_sync import WeightSyncError, transfer_of


def three_syncs(server, model, transfer) -> None:
    """The first runs the engine's loader, the others are copies; each must be exact and reach the sampler."""
    ids = AutoTokenizer.from_pretrained(server.model)(canary.TEXT).input_ids
    client = PolicyClient(server.url)
    flight = InFlight(server.url, server.model, max_tokens=3000)
    before = None
    for number in range(3):
        found = ours(model, transfer)
        assert found["way"] == ("loader" if number == 0 else "copies"), transfer.applied
        assert wrong_parameters(model, transfer) == []
        theirs = client.prompt_logprobs(server.model, ids)
        assert pristine.distance(theirs, canary.trainer_logprobs(model, ids).tolist()) < canary.TOLERANCES["bfloat16"]
        assert before is None or pristine.distance(theirs, before) > 1e-3, "the sync did not reach the sampler"
        before = theirs
        nudge(model, 0.05)
    seen = len(flight.times)
    time.sleep(2)
    flight.stop = True
    assert len(flight.times) > seen and not flight.failed, "the request in flight went on"


@pytest.mark.policy("tiny-train")
def test_ipc_is_exact(server, tmp_path):
    model = load_policy(TINY)
    transfer = transfer_of(server.url, tmp_path, timeout=45)
    assert isinstance(transfer, IpcWeightTransfer)
    transfer.init_weight_transfer()
    three_syncs(server, model, transfer)
    with pytest.raises(WeightSyncError, match="cannot connect two processes on one GPU"):
        flat_transfer(server.url, True, 45)
    transfer.destroy()


@pytest.mark.policy("large-train")
def test_ipc_is_exact_at_the_shape_of_2_6b(server, large_model):
    transfer = flat_transfer(server.url, False, 45)
    transfer.init_weight_transfer()
    three_syncs(server, load_policy(large_model), transfer)


@pytest.mark.policy("large-train")
def test_an_engine_that_is_killed_ends_the_sync_with_a_message(server, servers, large_model):
    model = load_policy(large_model)
    transfer = flat_transfer(server.url, False, 45)
    transfer.init_weight_transfer()
    ours(model, transfer)
    servers.kill("large-train")
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="policy server at .* failed after .*policy.log"):
        ours(model, transfer)
    assert time.monotonic() - began < 50


@pytest.mark.policy("tiny-nccl")
def test_nccl_is_exact_and_a_killed_engine_ends_it(server, servers):
    model = load_policy(TINY)
    transfer = flat_transfer(server.url, False, 20)
    assert isinstance(transfer, NcclWeightTransfer)
    transfer.init_weight_transfer()
    three_syncs(server, model, transfer)
    servers.kill("tiny-nccl")
    began = time.monotonic()
    with pytest.raises(WeightSyncError):
        ours(model, transfer)
    assert time.monotonic() - began < 50
    with contextlib.suppress(WeightSyncError):
        transfer.destroy()


@pytest.mark.policy("large-nccl")
def test_an_engine_that_dies_inside_a_broadcast_ends_the_sync(server, servers, large_model, monkeypatch):
    """5 GB do not fit into NCCL's own buffers, so the sender waits for a receiver that is gone, and looks for it."""
    model = load_policy(large_model)
    transfer = flat_transfer(server.url, False, 20)
    transfer.init_weight_transfer()
    ours(model, transfer)
    worker = transfer._worker

    def call(method: str, *args: str):
        answer = worker(method, *args)
        if method == "flat_receive":  # the engine has begun to receive
            servers.kill("large-nccl")
        return answer

    monkeypatch.setattr(transfer, "_worker", call)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="not received by .* gone|broadcast of the weights .* failed") as raised:
        ours(model, transfer)
    print(f"ended after {time.monotonic() - began:.1f} s: {raised.value}")
    assert time.monotonic() - began < 15


@pytest.mark.policy("tiny-eval")
def test_an_adapter_is_loaded_and_unloaded_by_name(server, tmp_path):
    model = load_policy(TINY)
    nudge(model, 0.1)
    model.save_pretrained(tmp_path / "adapter")  # as train_lora.py writes it
    settings = Settings.load({"PRESET": "job", "MODEL": str(TINY)})
    client = PolicyClient(server.url)
    client.load_adapter("tuned", tmp_path / "adapter")
    found = pristine.check(settings, client, tmp_path / "adapter", "tuned")
    assert found["adapter_against_base"] > found["tolerance"], "the adapter is too small for this test to see it"
    client.unload_adapter("tuned")
    assert list(client.models()) == [str(TINY)]
