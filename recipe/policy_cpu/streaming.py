"""Server-sent events of a chat answer.

Text goes out token by token. A tool call goes out whole, in one delta once it is complete: what the parser makes
of half a call can change with the next token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from recipe.policy_cpu.chat import assistant_message
from recipe.policy_cpu.engine import Completion
from recipe.policy_cpu.lfm2_calls import START
from recipe.policy_cpu.protocol import ChatBody
from recipe.policy_cpu.service import Service

BROKEN = "\ufffd"  # half a character: its other bytes come with the next token


async def stream_chat(service: Service, body: ChatBody, completions: list[Completion],
                      answer_id: str) -> AsyncIterator[str]:
    """Yields vLLM's chunks: the role, deltas, a finish reason per choice, usage if asked for, [DONE].

    When the client goes away the server cancels this generator and the completions are aborted.
    """
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    for completion in completions:
        completion.on_token = lambda: loop.call_soon_threadsafe(news.set)
        completion.done.add_done_callback(lambda _: loop.call_soon_threadsafe(news.set))
    head = {"id": answer_id, "object": "chat.completion.chunk", "created": int(time.time()),
            "model": completions[0].policy.name}

    def event(**fields: Any) -> str:
        return f"data: {json.dumps({**head, **fields}, ensure_ascii=False)}\n\n"

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> str:
        return event(choices=[{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason,
                               **fields}])

    try:
        for completion in completions:
            service.engine.submit(completion)
        for index in range(len(completions)):
            yield chunk(index, {"role": "assistant", "content": ""})
        sent = [""] * len(completions)
        open_choices = set(range(len(completions)))
        while open_choices:
            await news.wait()
            news.clear()
            for index in sorted(open_choices):
                completion = completions[index]
                ended = completion.done.done()
                delta = _delta(service, body, completion, sent, index, ended)
                if ended:
                    open_choices.discard(index)
                    completion.done.result()
                    reason = "tool_calls" if "tool_calls" in delta else completion.finish_reason
                    yield chunk(index, delta, reason, stop_reason=completion.stop_reason)
                elif delta:
                    yield chunk(index, delta)
        if (body.stream_options or {}).get("include_usage"):
            yield event(choices=[], usage=service.usage([completions[0].prompt], completions))
        yield "data: [DONE]\n\n"
    finally:
        for completion in completions:
            if not completion.done.done():
                service.engine.abort(completion)


def _delta(service: Service, body: ChatBody, completion: Completion, sent: list[str], index: int,
           ended: bool) -> dict[str, Any]:
    """The delta that brings the client from `sent[index]` to what is known now; {} when there is nothing new."""
    skip = body.skip_special_tokens and not body.parses_calls
    if ended:
        text = service.text.output(completion, skip)
    else:
        text = service.text.decode(list(completion.tokens), skip)
        if text.endswith(BROKEN) or body.stop:
            return {}  # a stop string is cut off at the end, so nothing may go out before it could match
    delta: dict[str, Any] = {}
    if ended:
        message = assistant_message(text, body.parses_calls, body.parallel_tool_calls is not False)
        text = message["content"] or ""
        if "tool_calls" in message:
            delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(message["tool_calls"])]
    elif body.parses_calls:
        text = text.partition(START)[0]
    if len(text) > len(sent[index]) and text.startswith(sent[index]):
        delta["content"], sent[index] = text[len(sent[index]) :], text
    return delta
