"""How merged weights reach vLLM: one flat buffer, by CUDA IPC on one GPU or by NCCL between two.

    stage         merge and pack the weights into the buffer (and send it, with two GPUs) while the engine samples
    pause         the engine stops between two tokens
    send_weights  one call: the engine copies from the buffer to its parameters
    resume        it goes on

vLLM's side is recipe/vllm_weights.py. Nothing here waits longer than `timeout`: an engine that was killed or hangs ends
the run with a WeightSyncError, whatever NCCL does.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import requests
import torch

from recipe import flat_weights
from recipe.vllm_weights import gpu_uuid, receive, share
from recipe.weight_sync import HttpPhases, Stream, WeightSyncError

LOOK = 1.0  # seconds of a broadcast, which takes 15 ms, between two looks at whether its receiver lives
ANSWER = 2.0  # seconds for the answer to a look


def flat_transfer(server_url: str, stock: bool, timeout: float) -> FlatWeightTransfer | None:
    """By CUDA IPC where policy server and trainer are on the same GPU, by NCCL where not; None for TRL's own NCCL."""
    if not torch.cuda.is_available():
        raise WeightSyncError(f"the policy server at {server_url} is vLLM, and the trainer sees no GPU: it needs one, "
                              "or ENGINE=cpu and a small model.")
    there = call_worker(HttpPhases(server_url, timeout), "flat_device")
    here = gpu_uuid(torch.cuda.current_device())
    if stock and here == there["uuid"]:
        raise WeightSyncError("WEIGHT_SYNC=stock is NCCL, which cannot connect two processes on one GPU: set "
                              "WEIGHT_SYNC=auto, or give the policy server another GPU (POLICY_GPU).")
    print(f"weights to vLLM {there['vllm']} on {there['gpu']}: " + (
        "TRL's NCCL client" if stock else "CUDA IPC" if here == there["uuid"] else "one NCCL broadcast"), flush=True)
    if stock:
        return None
    return (IpcWeightTransfer if here == there["uuid"] else NcclWeightTransfer)(server_url, timeout)


def call_worker(phases: HttpPhases, method: str, *args: str) -> dict[str, Any]:
    """What a method of recipe.vllm_weights.FlatWeights returns. Raises WeightSyncError when it failed."""
    answer = phases._call("POST", "/collective_rpc", json={"method": method, "args": list(args)})
    result = answer.json()["results"][0]
    if "error" in result:
        raise WeightSyncError(f"{method} of the policy server at {phases.server_url} failed: {result['error']}. "
                              "See logs/policy.log.")
    return result


class FlatWeightTransfer(HttpPhases):
    """TRL's weight-transfer protocol with one more phase, `stage`, before the pause; see the module's docstring.

    The buffer, of the model's size, is made at the first sync and kept: every later one reuses it and the engine's
    view of it. `timings` holds the seconds of stage, pause, flat_apply and resume of the last sync.
    """

    way = ""

    def __init__(self, server_url: str, timeout: float, device: torch.device | None = None):
        super().__init__(server_url, timeout)
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.flat: torch.Tensor | None = None
        self.slots: list[flat_weights.Slot] = []
        self.staged = False
        self.applied: dict[str, Any] = {}  # the engine's report of the last sync

    def init_weight_transfer(self) -> None:
        self._call("GET", "/health")

    def stage(self, iterator: Stream) -> None:
        """All that can be done while the engine samples. Raises WeightSyncError."""
        started = time.monotonic()
        first = self.flat is None
        if first:
            tensors = list(iterator)
            self.slots = flat_weights.plan(tensors)
            self.flat = torch.empty(flat_weights.size(self.slots), dtype=torch.uint8, device=self.device)
            flat_weights.pack(self.flat, self.slots, tensors)
            del tensors
        else:
            flat_weights.pack(self.flat, self.slots, iterator)
        if self.flat.is_cuda:
            torch.cuda.synchronize(self.device)
        self.timings["pack"] = time.monotonic() - started
        if first:
            self._open({"slots": flat_weights.to_json(self.slots)})
        self._send()
        self.staged = True
        self.timings["stage"] = time.monotonic() - started

    def send_weights(self, iterator: Stream) -> None:
        """The engine takes over what is staged; stages `iterator` first where nobody has."""
        if not self.staged:
            self.stage(iterator)
        self.staged = False
        self.applied = self._worker("flat_apply")

    def destroy(self) -> None:
        """The engine keeps what it has; the buffer goes."""
        self.flat, self.slots, self.staged = None, [], False

    def _worker(self, method: str, *args: str) -> dict[str, Any]:
        started = time.monotonic()
        result = call_worker(self, method, *args)
        self.timings[method] = time.monotonic() - started
        return result

    def _open(self, request: dict[str, Any]) -> None:
        raise NotImplementedError

    def _send(self) -> None:
        raise NotImplementedError


class IpcWeightTransfer(FlatWeightTransfer):
    """One GPU: the engine reads the trainer's buffer itself."""

    way = "ipc"

    def _open(self, request: dict[str, Any]) -> None:
        self._worker("flat_open", json.dumps(request | {"ipc": share(self.flat)}))

    def _send(self) -> None:
        """Nothing: packing has written the memory that the engine reads."""


class NcclWeightTransfer(FlatWeightTransfer):
    """Two GPUs: one broadcast from buffer to buffer, which the engine's own work goes on beside."""

    way = "nccl"

    def __init__(self, server_url: str, timeout: float, device: torch.device | None = None):
        super().__init__(server_url, timeout, device)
        self.group: Any = None

    def _open(self, request: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group
        from vllm.utils.network_utils import get_ip

        local = urlsplit(self.server_url).hostname in ("127.0.0.1", "localhost", "::1")
        host, port = "127.0.0.1" if local else get_ip(), free_port()
        failed: list[Exception] = []

        def join() -> None:
            try:
                self.group = stateless_init_process_group(host, port, 0, 2, self.device)
            except Exception as err:  # noqa: BLE001 - raised below
                failed.append(err)

        # Joining returns when both sides are there; the call to the server is what may fail in time.
        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        self._worker("flat_open", json.dumps(request | {"nccl": {"host": host, "port": port}}))
        thread.join(self.timeout)
        if failed or self.group is None:
            raise WeightSyncError(f"the trainer could not join the NCCL group with the policy server at "
                                  f"{self.server_url}: {failed or f'no answer in {self.timeout:g} s'}. "
                                  "NCCL_DEBUG=INFO says more.")
        self.stream, self.sent = torch.cuda.Stream(self.device), torch.cuda.Event()

    def _send(self) -> None:
        self._worker("flat_receive")
        deadline = time.monotonic() + self.timeout
        problem = (f"the weights were not received within {self.timeout:g} s by the policy server at "
                   f"{self.server_url}: it died or hangs")
        try:
            receive(self.group, self.flat, self.stream)
            self.sent.record(self.stream)
            look, missed = time.monotonic() + LOOK, 0
            while time.monotonic() < deadline:  # NCCL has no timeout and does not see that the receiver is gone
                if self.sent.query():
                    return
                if time.monotonic() > look:
                    dead = self._death()
                    missed = missed + 1 if dead else 0
                    if missed == 2:
                        problem = f"the weights were not received by the policy server at {self.server_url}: {dead}"
                        break
                    look = time.monotonic() + LOOK
                time.sleep(0.0005)
        except RuntimeError as err:  # NCCL's or CUDA's: the other process is gone, and its memory
            problem = f"the broadcast of the weights to the policy server at {self.server_url} failed: {err}"
        with contextlib.suppress(RuntimeError):
            self.destroy()
        raise WeightSyncError(f"{problem}. See logs/policy.log.")

    def _death(self) -> str | None:
        """Why the server cannot be receiving; None where it answers, or may be too busy to."""
        try:
            # of the body nothing is read: one that comes late would look like a broken connection
            with requests.get(self.server_url + "/health", timeout=ANSWER, stream=True) as answer:
                return None if answer.status_code < 500 else f"it answers {answer.status_code} to GET /health"
        except requests.Timeout:
            return None
        except requests.RequestException as err:
            return f"it is gone ({err})"

    def destroy(self) -> None:
        group, self.group = self.group, None
        super().destroy()
        if group is not None:
            group.destroy()  # aborts a broadcast that nobody receives, which would hold the process at its end


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
