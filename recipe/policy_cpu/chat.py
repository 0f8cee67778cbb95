"""Between text and token ids: the chat template, the tokenizer, and the shapes of log-probs in answers."""

from __future__ import annotations

import json
import uuid
from itertools import accumulate
from typing import Any

from recipe.policy_cpu import lfm2_calls
from recipe.policy_cpu.engine import Completion
from recipe.policy_cpu.errors import ApiError
from recipe.policy_cpu.sampling import Ranked

LOWEST = -9999.0  # vLLM's stand-in for -inf, which JSON lacks


class Text:
    """Renders and encodes prompts, decodes output. tokenizer: a fast transformers tokenizer with a chat template."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        # The Rust tokenizer itself is safe to share with the engine's thread; transformers' wrapper sets
        # truncation on it in every call, which is not.
        self.backend = tokenizer.backend_tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
               add_generation_prompt: bool = True, template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """A conversation in OpenAI's format → prompt ids. Raises ApiError (400) when the template refuses it."""
        if not messages:
            raise ApiError("`messages` must not be empty.", param="messages")
        try:
            text = self.tokenizer.apply_chat_template(
                [_message(message) for message in messages], tools=tools and [_tool(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt, tokenize=False, **(template_kwargs or {}))
        except ApiError:
            raise
        except Exception as error:  # noqa: BLE001 - a template raises what it likes; vLLM answers 400 as well
            raise ApiError(f"the chat template refused the conversation: {error}", param="messages") from error
        return self.encode(text, add_special_tokens=False)

    def output(self, completion: Completion, skip_special_tokens: bool) -> str:
        """The completion's text, without the token or string that stopped it unless the request wants it."""
        ids, params = completion.tokens, completion.params
        by_string = isinstance(completion.stop_reason, str)
        if completion.finish_reason == "stop" and not by_string and not params.include_stop_str:
            ids = ids[:-1]
        text = self.decode(ids, skip_special_tokens)
        if by_string:
            end = text.find(completion.stop_reason)
            text = text[: end + len(completion.stop_reason) if params.include_stop_str else end]
        return text

    def token_name(self, token: int, as_id: bool) -> str:
        """`token_id:N` (what --return-tokens-as-token-ids gives) or the token's text."""
        return f"token_id:{token}" if as_id else self.decode([token], False)

    # -- shapes of log-probs --------------------------------------------------------------------------------------
    def chat_logprobs(self, completion: Completion, best: int, as_id: bool) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            name = self.token_name(token, as_id)
            text = name if not as_id else self.decode([token], False)
            return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(text.encode())}

        return {"content": [
            {**entry(token, ranked[token][0]),
             "top_logprobs": [entry(t, lp) for t, (lp, _) in list(ranked.items())[:best]]}
            for token, ranked in zip(completion.tokens, completion.ranked, strict=True)]}

    def text_logprobs(self, completion: Completion, best: int, as_id: bool) -> dict[str, Any]:
        names = [self.token_name(token, as_id) for token in completion.tokens]
        offsets = list(accumulate((len(name) for name in names[:-1]), initial=0))
        top = [{self.token_name(t, as_id): max(lp, LOWEST) for t, (lp, _) in list(ranked.items())[: best + 1]}
               for ranked in completion.ranked]
        values = [max(ranked[token][0], LOWEST)
                  for token, ranked in zip(completion.tokens, completion.ranked, strict=True)]
        return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": top}

    def prompt_logprobs(self, completion: Completion) -> list[dict[str, Any] | None]:
        def entries(ranked: Ranked) -> dict[str, Any]:
            return {str(token): {"logprob": max(lp, LOWEST), "rank": rank, "decoded_token": self.decode([token], False)}
                    for token, (lp, rank) in ranked.items()}

        return [None if ranked is None else entries(ranked) for ranked in completion.prompt_ranked]


def assistant_message(text: str, parse_calls: bool, parallel: bool) -> dict[str, Any]:
    """The assistant message of a chat answer; `tool_calls` only where there are some, as vLLM serialises it."""
    content, calls = lfm2_calls.parse(text) if parse_calls else (text, [])
    message = {"role": "assistant", "content": content, "refusal": None, "annotations": None, "audio": None,
               "function_call": None, "reasoning": None}
    if calls:
        message["tool_calls"] = [
            {"id": f"chatcmpl-tool-{uuid.uuid4().hex}", "type": "function",
             "function": {"name": call.name, "arguments": call.arguments}}
            for call in (calls if parallel else calls[:1])]
    return message


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Only the fields that vLLM shows to the template."""
    function = tool.get("function")
    if not isinstance(function, dict) or "name" not in function:
        raise ApiError("each of `tools` needs a `function` with a `name`.", param="tools")
    shown = {"name": function["name"], "description": function.get("description"),
             "parameters": function.get("parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """One OpenAI message as a template sees it under vLLM: content is text, call arguments are objects."""
    if not isinstance(message.get("role"), str):
        raise ApiError("each of `messages` needs a `role`.", param="messages")
    shown = {"role": message["role"], "content": _content(message.get("content"))}
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if message["role"] == "assistant" and reasoning is not None:
        shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message["role"] == "assistant" and message.get("tool_calls"):
        shown["tool_calls"] = [_past_call(call) for call in message["tool_calls"]]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            shown[name] = message[name]
    return shown


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    if any(part is None for part in parts):
        raise ApiError("only text content is supported.", param="messages")
    return "\n".join(parts)


def _past_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ApiError("chat completions only support assistant tool_calls of type 'function'.", param="tool_calls")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}  # it is in the history: refusing it would refuse every later turn of the conversation too
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}
