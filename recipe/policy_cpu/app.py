"""The OpenAI routes and the health route of vLLM, answered by the CPU engine."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from recipe import digests
from recipe.policy_cpu import admin, errors
from recipe.policy_cpu.chat import assistant_message
from recipe.policy_cpu.engine import Completion
from recipe.policy_cpu.errors import ApiError
from recipe.policy_cpu.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from recipe.policy_cpu.service import Service
from recipe.policy_cpu.streaming import stream_chat

CODE = digests.of_files(sorted(Path(__file__).parent.glob("*.py")))
VERSION = f"cpu {CODE}, torch {torch.__version__}"
CLIENT_CLOSED = 499  # nobody reads it: the client has gone


def create_app(service: Service) -> FastAPI:
    """The server's routes over one service. Loading and unloading of adapters exists only with enable_lora."""
    app = FastAPI(title="CPU policy server", docs_url=None, redoc_url=None)
    errors.install(app)
    admin.add_routes(app, service)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.engine.failure is None else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        cards = [_card(service, service.store.base.name, service.model_path, None)]
        cards += [_card(service, a.name, a.path, service.store.base.name) for a in service.store.adapters.values()]
        return {"object": "list", "data": cards}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        policy = service.policy(body.model)
        if isinstance(body.tool_choice, dict) or body.tool_choice not in (None, "none", "auto"):
            raise ApiError("`tool_choice` must be none or auto: the CPU policy server cannot force a call.",
                           param="tool_choice")
        prompt = service.text.render(body.messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs)
        best = body.top_logprobs if body.logprobs else None
        params = body.params(service.output_room(prompt, body.output_limit), best)
        completions = service.completions(body, policy, prompt, params)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        if body.stream:
            return StreamingResponse(stream_chat(service, body, completions, answer_id),
                                     media_type="text/event-stream")
        if not await service.run(request, completions):
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse({
            **_head(answer_id, "chat.completion", policy.name),
            "choices": [_chat_choice(service, body, i, c) for i, c in enumerate(completions)],
            "usage": service.usage([prompt], completions),
            "prompt_logprobs": service.text.prompt_logprobs(completions[0]) if body.prompt_logprobs is not None
            else None,
            "prompt_token_ids": prompt if body.return_token_ids else None})

    @app.post("/v1/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        policy = service.policy(body.model)
        if body.stream:
            raise ApiError("`stream` is supported on /v1/chat/completions only.", param="stream")
        prompts = _prompts(service, body)
        completions: list[Completion] = []
        for prompt in prompts:
            wanted = 16 if body.max_tokens is None else body.max_tokens  # OpenAI's default, kept by vLLM
            params = body.params(service.output_room(prompt, wanted), body.logprobs)
            completions += service.completions(body, policy, prompt, params)
        if not await service.run(request, completions):
            return Response(status_code=CLIENT_CLOSED)
        return JSONResponse({
            **_head(f"cmpl-{uuid.uuid4().hex}", "text_completion", policy.name),
            "choices": [_text_choice(service, body, i, c) for i, c in enumerate(completions)],
            "usage": service.usage(prompts, completions)})

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service.policy(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give either `prompt` or `messages`.", param="prompt")
        if body.prompt is not None:
            ids = service.text.encode(body.prompt, body.add_special_tokens is not False)
        else:
            ids = service.text.render(body.messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs)
        names = [service.text.tokenizer.convert_ids_to_tokens(i) for i in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": names}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service.policy(body.model)
        return {"prompt": service.text.decode(body.tokens, False)}

    return app


def _head(answer_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model,
            "service_tier": None, "system_fingerprint": None}


def _card(service: Service, name: str, root: str, parent: str | None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.started, "owned_by": "vllm", "root": root,
            "parent": parent, "max_model_len": service.max_model_len if parent is None else None, "permission": []}


def _prompts(service: Service, body: CompletionBody) -> list[list[int]]:
    """One list of ids per prompt: the field takes a text, ids, or a list of either."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    return [service.text.encode(p, body.add_special_tokens) if isinstance(p, str) else list(p) for p in given]


def _as_ids(service: Service, wanted: bool | None) -> bool:
    return service.tokens_as_ids if wanted is None else wanted


def _chat_choice(service: Service, body: ChatBody, index: int, completion: Completion) -> dict[str, Any]:
    # The sentinels of a call are special tokens: the parser needs them, whatever skip_special_tokens says.
    text = service.text.output(completion, body.skip_special_tokens and not body.parses_calls)
    message = assistant_message(text, body.parses_calls, body.parallel_tool_calls is not False)
    logprobs = None
    if completion.params.logprobs is not None:
        as_ids = _as_ids(service, body.return_tokens_as_token_ids)
        logprobs = service.text.chat_logprobs(completion, completion.params.logprobs, as_ids)
    return {"index": index, "message": message, "logprobs": logprobs,
            "finish_reason": "tool_calls" if "tool_calls" in message else completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.tokens if body.return_token_ids else None}


def _text_choice(service: Service, body: CompletionBody, index: int, completion: Completion) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
        as_ids = _as_ids(service, body.return_tokens_as_token_ids)
        logprobs = service.text.text_logprobs(completion, body.logprobs, as_ids)
    return {"index": index, "text": service.text.output(completion, body.skip_special_tokens), "logprobs": logprobs,
            "finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason,
            "token_ids": completion.tokens if body.return_token_ids else None,
            "prompt_token_ids": completion.prompt if body.return_token_ids else None,
            "prompt_logprobs": service.text.prompt_logprobs(completion) if body.prompt_logprobs is not None else None}
