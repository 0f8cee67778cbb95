"""Pausing, new weights and adapters: vLLM's routes for them, with weights by file on this machine.

As in vLLM, whoever reaches the pausing and weight routes owns the policy, so they exist only in development mode
(VLLM_SERVER_DEV_MODE=1 there, --dev-mode here), and those of adapters only with --enable-lora.

A trainer updates weights in five calls, the same as TRL makes to vLLM:

    POST /pause?mode=keep
    POST /start_weight_update
    POST /update_weights      {"update_info": {"path": "/run/weights/step-12.safetensors"}}
    POST /finish_weight_update
    POST /resume
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response

from recipe.policy_cpu.engine import PauseMode
from recipe.policy_cpu.errors import ApiError
from recipe.policy_cpu.protocol import LoadAdapterBody, UnloadAdapterBody
from recipe.policy_cpu.service import Service
from recipe.policy_cpu.weights import AdapterNotFound, WeightError


def add_routes(app: FastAPI, service: Service) -> None:
    """Adds the control routes that the service's mode allows."""
    if service.dev_mode:
        _add_info(app, service)
        _add_pausing(app, service)
        _add_weight_update(app, service)
    if service.enable_lora:
        _add_adapters(app, service)


def _add_info(app: FastAPI, service: Service) -> None:
    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        lora = {"max_lora_rank": service.store.max_lora_rank} if service.enable_lora else None
        return {"vllm_config": {
            "model_config": {"model": service.model_path, "dtype": f"torch.{service.dtype}",
                             "max_model_len": service.max_model_len, "logprobs_mode": "processed_logprobs"},
            "parallel_config": {"world_size": 1, "data_parallel_size": 1},
            "cache_config": {"enable_prefix_caching": service.engine.cache.max_bytes > 0,
                             "block_size": service.engine.cache.block, "mamba_cache_mode": "align"},
            "lora_config": lora,
            "weight_transfer_config": {"backend": "file"}},
            "vllm_env": {"VLLM_SERVER_DEV_MODE": True, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": service.enable_lora},
            "system_env": {"engine": "cpu", "pid": os.getpid(), "weight_version": service.store.version,
                           "running": len(service.engine.running), "waiting": len(service.engine.waiting)}}

    @app.get("/get_world_size")
    async def get_world_size() -> dict[str, int]:
        return {"world_size": 1}


def _add_pausing(app: FastAPI, service: Service) -> None:
    @app.post("/pause")
    async def pause(mode: Annotated[PauseMode, Query()] = "abort",
                    clear_cache: Annotated[bool, Query()] = True) -> dict[str, str]:
        await asyncio.wrap_future(service.engine.pause(mode, clear_cache))
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        await asyncio.wrap_future(service.engine.resume())
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": service.engine.paused is not None}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        await service.in_engine(service.engine.cache.clear)
        return {"success": True}


def _add_weight_update(app: FastAPI, service: Service) -> None:
    store = service.store

    async def attempt(function) -> Any:
        """vLLM answers a failed update with 500; the old weights stay in service."""
        try:
            return await service.in_engine(function)
        except WeightError as error:
            raise ApiError(str(error), "InternalServerError", 500) from error

    @app.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(request: Request) -> dict[str, str]:
        info = await _field(request, "init_info")
        if info.get("backend", "file") != "file" or "master_address" in info:
            raise ApiError("the CPU policy server takes weights by file, not by NCCL: start the trainer with the "
                           "file weight transfer.", "InternalServerError", 500)
        return {"message": "Weight transfer initialized"}

    @app.post("/start_weight_update")
    async def start_weight_update() -> dict[str, str]:
        await attempt(store.start_update)
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update_weights(request: Request) -> dict[str, Any]:
        info = await _field(request, "update_info")
        if not isinstance(info.get("path"), str):
            raise ApiError("`update_info` needs a `path`: a safetensors file on this machine.", param="update_info")
        count = await attempt(lambda: store.update_from_file(info["path"]))
        return {"message": "Weights updated", "tensors": count}

    @app.post("/finish_weight_update")
    async def finish_weight_update() -> dict[str, str]:
        await attempt(lambda: (store.finish_update(), service.engine.cache.clear()))
        return {"message": "Weight update finished"}


async def _field(request: Request, name: str) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise HTTPException(400, "Invalid JSON format") from None
    if not isinstance(body, dict) or not isinstance(body.get(name), dict):
        raise HTTPException(400, f"Missing '{name}' in request body")
    return body[name]


def _add_adapters(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.post("/v1/load_lora_adapter")
    async def load(body: LoadAdapterBody) -> Response:
        name, path = body.lora_name, body.lora_path
        if not name or not path:
            raise ApiError("Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name == store.base.name:
            raise ApiError(f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
        if name in store.adapters and not body.load_inplace:
            raise ApiError(f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                           "place, set 'load_inplace' to True.", "InvalidUserInput")
        try:
            await service.in_engine(lambda: store.load_adapter(name, path))
        except AdapterNotFound:
            raise ApiError(f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError", 404) from None
        except WeightError as error:
            raise ApiError(str(error), "InternalServerError", 500) from error
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadAdapterBody) -> Response:
        name = body.lora_name
        if not name:
            raise ApiError("'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
        if name not in store.adapters:
            raise ApiError(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        await service.in_engine(lambda: store.unload_adapter(name))
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")
