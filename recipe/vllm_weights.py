"""vLLM's side of our weight sync: methods that --worker-extension-cls adds to its worker, called over /collective_rpc.

    vllm serve … --worker-extension-cls recipe.vllm_weights.FlatWeights      (serve_policy.sh --mode train)

The trainer (recipe/gpu_weight_transfer.py) keeps all merged weights in one flat buffer. With one GPU the worker opens
that very memory by CUDA IPC; with two it has a buffer of the same size, filled by one NCCL broadcast while it goes on
sampling. Either way what happens between pause and resume is one call, `flat_apply`: device copies from the buffer to
the parameters (recipe/flat_weights.py). vLLM's own "ipc" engine imports ray and opens a handle for each tensor.

Written for and read in vLLM 0.26.0 and 0.31.0. One worker (no tensor or pipeline parallelism). Each method returns a
dict; {"error": text} when it failed, because the route hides exceptions. Imports nothing but torch and vLLM.
"""

from __future__ import annotations

import base64
import functools
import json
import traceback
from collections.abc import Callable
from typing import Any

import torch

from recipe.flat_weights import Receiver, from_json, size

# What makes a buffer's memory visible in another process: the fields of torch's storage._share_cuda_().
IPC_FIELDS = ("device", "handle", "size", "offset", "ref_counter", "ref_counter_offset", "event", "event_sync")
CHUNK = 2**30  # bytes of one broadcast


def share(flat: torch.Tensor) -> dict[str, Any]:
    """The IPC handle of a CUDA buffer as JSON can hold it; `flat` must live as long as the other side uses it."""
    values = flat.untyped_storage()._share_cuda_()
    return {name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in zip(IPC_FIELDS, values, strict=True)}


def open_shared(handle: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The buffer (bytes) behind a handle of `share`, on the same GPU in another process."""
    values = [base64.b64decode(handle[name]) if isinstance(handle[name], str) else handle[name] for name in IPC_FIELDS]
    values[0] = device.index or 0  # the same card may have another number there
    torch.cuda._lazy_init()
    storage = torch.UntypedStorage._new_shared_cuda(*values)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def gpu_uuid(device: torch.device | int | None = None) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def reports(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Returns JSON's own types, and an exception as {"error": …}."""
    @functools.wraps(method)
    def call(self: Any, *args: Any) -> dict[str, Any]:
        try:
            return json.loads(json.dumps(method(self, *args)))  # plain types: vLLM refuses others, in silence
        except Exception as err:  # noqa: BLE001 - the trainer is told, and stops
            traceback.print_exc()
            return {"error": f"{type(err).__name__}: {err}"}

    return call


class FlatWeights:
    """Mixed into vLLM's Worker: `self` has device, model_runner, parallel_config and vllm_config."""

    @reports
    def flat_device(self) -> dict[str, Any]:
        """Which GPU this worker is on, and the versions that run here."""
        import vllm

        free, total = torch.cuda.mem_get_info(self.device)
        return {"uuid": gpu_uuid(self.device), "gpu": torch.cuda.get_device_name(self.device), "free": free,
                "total": total, "vllm": vllm.__version__, "torch": torch.__version__}

    @reports
    def flat_open(self, request: str) -> dict[str, Any]:
        """`request` is JSON: slots, and either ipc (a handle of `share`) or nccl ({"host", "port"}; we are rank 1)."""
        if self.parallel_config.world_size != 1:
            raise RuntimeError(f"{self.parallel_config.world_size} workers: set WEIGHT_SYNC=stock for an engine that "
                               "is split over several GPUs")
        from vllm.config import set_current_vllm_config

        asked = json.loads(request)
        slots = from_json(asked["slots"])
        self.flat_close()
        if "ipc" in asked:
            flat = open_shared(asked["ipc"], self.device)[:size(slots)]
        else:
            from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

            flat = torch.empty(size(slots), dtype=torch.uint8, device=self.device)
            self._flat_group = stateless_init_process_group(asked["nccl"]["host"], asked["nccl"]["port"], 1, 2,
                                                            self.device)
            self._flat_stream, self._flat_arrived = torch.cuda.Stream(self.device), torch.cuda.Event()
        self._flat_receiver = Receiver(flat, slots, self.model_runner.get_model().load_weights,
                                       lambda: set_current_vllm_config(self.vllm_config))
        return {"bytes": flat.numel()}

    @reports
    def flat_receive(self) -> dict[str, Any]:
        """Begins to receive the next weights into the buffer, beside whatever the GPU does, and returns at once."""
        receive(self._flat_group, self._flat_receiver.flat, self._flat_stream)
        self._flat_arrived.record(self._flat_stream)
        return {}

    @reports
    def flat_apply(self) -> dict[str, Any]:
        """From the buffer to the parameters; call it while the engine is paused."""
        if getattr(self, "_flat_arrived", None) is not None:
            torch.cuda.current_stream(self.device).wait_event(self._flat_arrived)
        return self._flat_receiver.apply()

    @reports
    def flat_checksums(self) -> dict[str, Any]:
        """Two sums over each parameter, for tests: equal memory has equal sums."""
        model = self.model_runner.get_model()
        return {name: checksum(parameter.detach()) for name, parameter in model.named_parameters()}

    @reports
    def flat_close(self) -> dict[str, Any]:
        """Lets go of the buffer and leaves the group."""
        if getattr(self, "_flat_group", None) is not None:
            self._flat_group.destroy()
        self._flat_receiver = self._flat_group = self._flat_arrived = self._flat_stream = None
        return {}


def receive(group: Any, flat: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Both sides of the broadcast from rank 0 (vLLM's PyNcclCommunicator), on `stream`, without waiting for it."""
    stream.wait_stream(torch.cuda.current_stream(flat.device))  # what read or wrote the buffer last is done first
    with torch.cuda.stream(stream):
        for part in flat.split(CHUNK):
            group.broadcast(part, src=0, stream=stream)


def checksum(tensor: torch.Tensor) -> list[int]:
    """[sum, position-weighted sum] of a tensor's 16-bit words, exact and independent of how they are summed."""
    words = tensor.contiguous().view(torch.int16).flatten().to(torch.int64) & 0xFFFF
    places = torch.arange(words.numel(), device=words.device) % 65521 + 1
    return [int(words.sum()), int((words * places).sum())]
