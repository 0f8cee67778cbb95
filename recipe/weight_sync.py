"""How new weights reach the policy server: what is sent, and the file transfer of the CPU engine.

What is sent: `merged_parameters` streams W + scaling * B @ A one module at a time, computed in fp32 and rounded once to
the dtype of W. TRL merges the adapter into the base and takes it out again, in place and in the base's own dtype; in
bf16 that moves the frozen base with every sync, and the adapter is then trained on weights that no one else has.

How it travels: to vLLM as one flat buffer, by CUDA IPC on one GPU or by NCCL between two
(recipe/gpu_weight_transfer.py), or with WEIGHT_SYNC=stock by TRL's own NCCL client, which the trainer builds itself;
the CPU engine reads a safetensors file on the same machine (`FileWeightTransfer`). All stand behind TRL's protocol:
pause -> send_weights -> resume.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params

Stream = Iterator[tuple[str, torch.Tensor]]
EXTENSION = "recipe.vllm_weights.FlatWeights"  # what serve_policy.sh --mode train adds to vLLM's worker


class WeightSyncError(RuntimeError):
    """The policy server did not take the new weights; it may hold part of them."""


def merged_parameters(model: torch.nn.Module, device: torch.device | None = None) -> Stream:
    """(name, tensor) of every parameter of the policy as the engine must hold it, under the base checkpoint's names.

    Order, names, shapes and dtypes are those of TRL's manifest. The model is not written to. Raises TypeError on an
    adapted module whose update is not scaling * B @ A (DoRA, several adapters, another PEFT method, no linear layer).
    """
    adapted = {name.removeprefix("base_model.model."): module for name, module in model.named_modules()
               if isinstance(module, BaseTunerLayer)}
    for name, parameter in _iter_vllm_named_params(model):
        tensor = parameter.detach()
        module = adapted.get(name.removesuffix(".weight"))
        if module is not None and name.endswith(".weight"):
            tensor = merged_weight(module)
        yield name, tensor if device is None else tensor.to(device)


@torch.no_grad()
def merged_weight(module: BaseTunerLayer) -> torch.Tensor:
    """W + scaling * B @ A of one linear layer (out, in): fp32 arithmetic, rounded once to the dtype of W."""
    names = module.active_adapters
    if not isinstance(module, LoraLinear):
        raise TypeError(f"cannot stream {type(module).__module__}.{type(module).__name__}: the update must be that of "
                        "a LoRA on a linear layer (LORA_TARGETS)")
    if len(names) != 1 or any(module.use_dora.values()) or module.merged:
        raise TypeError(f"cannot stream {type(module).__name__}: exactly one plain, unmerged LoRA adapter is needed, "
                        f"found {names}, DoRA {module.use_dora}, merged {module.merged}")
    weight = module.get_base_layer().weight
    update = module.lora_B[names[0]].weight.float() @ module.lora_A[names[0]].weight.float()
    return (weight.float() + module.scaling[names[0]] * update).to(weight.dtype)


def transfer_of(server_url: str, folder: str | os.PathLike[str], stock: bool = False, timeout: float = 300.0
                ) -> HttpPhases | None:
    """The transfer that the policy server was started for; None stands for TRL's own NCCL client.

    `timeout`: seconds for one phase. Raises WeightSyncError for a server that takes no updates or serves adapters:
    with --enable-lora TRL would send the adapter under ever new names, which the agent does not use.
    """
    route = server_url.rstrip("/") + "/server_info"
    try:
        answer = requests.get(route, params={"config_format": "json"}, timeout=60)
        answer.raise_for_status()
        config = answer.json()["vllm_config"]
    except (requests.RequestException, ValueError, KeyError) as err:
        raise WeightSyncError(f"{route} does not say how the policy server takes weights ({err}). Start it with "
                              "serve_policy.sh --mode train, which sets VLLM_SERVER_DEV_MODE=1.") from err
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if config.get("lora_config") or backend not in ("nccl", "file"):
        raise WeightSyncError(f"the policy server at {server_url} takes no merged weights (adapters: "
                              f"{config.get('lora_config')}, weight transfer: {backend}). Start it with "
                              "serve_policy.sh --mode train.")
    if backend == "file":
        return FileWeightTransfer(server_url, folder)
    if (config.get("parallel_config") or {}).get("worker_extension_cls") != EXTENSION:
        return None
    from recipe.gpu_weight_transfer import flat_transfer

    return flat_transfer(server_url, stock, timeout)


class HttpPhases:
    """What every transfer shares: the phases that are calls to the policy server, and how they fail.

    `timings` holds the seconds of the last sync by part. Every method raises WeightSyncError with the server's answer
    when a phase does not succeed within `timeout` seconds. With `clear_cache`, TRL's way, vLLM computes requests in
    flight anew by the new weights; without it (benchmarks), they go on with keys and values of the old ones.
    """

    clear_cache = True

    def __init__(self, server_url: str, timeout: float):
        self.server_url, self.timeout = server_url.rstrip("/"), timeout
        self.timings: dict[str, float] = {}

    def pause(self) -> None:
        self._call("POST", "/pause", params={"mode": "keep"} | ({} if self.clear_cache else {"clear_cache": "false"}))

    def resume(self) -> None:
        self._call("POST", "/resume")

    def _call(self, method: str, route: str, **kwargs: Any) -> requests.Response:
        started = time.monotonic()
        try:
            response = requests.request(method, self.server_url + route, timeout=self.timeout, **kwargs)
        except requests.RequestException as err:
            raise WeightSyncError(f"{method} {route} of the policy server at {self.server_url} failed after "
                                  f"{time.monotonic() - started:.1f} s: {err}. See logs/policy.log.") from err
        if response.status_code != 200:
            raise WeightSyncError(f"{method} {route} of the policy server at {self.server_url} answered "
                                  f"{response.status_code}: {response.text[:500]}. The server may hold part of the new "
                                  "weights and may be paused; a new run sends all of them again. See logs/policy.log.")
        self.timings[route.strip("/")] = time.monotonic() - started
        return response


class FileWeightTransfer(HttpPhases):
    """TRL's weight-transfer protocol by a safetensors file that the CPU policy server reads.

    `folder` must be readable by the server's process; it holds one file of the model's size, replaced at each sync.
    """

    def __init__(self, server_url: str, folder: str | os.PathLike[str], timeout: float = 300.0):
        super().__init__(server_url, timeout)
        self.folder = Path(folder).resolve()
        self.syncs = 0

    def init_weight_transfer(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._call("GET", "/health")

    def send_weights(self, iterator: Stream) -> None:
        self.syncs += 1
        path = self.folder / f"sync-{self.syncs}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in iterator}, path)
        try:
            self._call("POST", "/start_weight_update", json={"is_checkpoint_format": True})
            self._call("POST", "/update_weights", json={"update_info": {"path": str(path)}})
            self._call("POST", "/finish_weight_update")
        finally:
            path.unlink()

    def destroy(self) -> None:
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
