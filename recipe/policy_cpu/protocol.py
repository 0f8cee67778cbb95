"""Request bodies of the OpenAI routes, with vLLM's field names, defaults and checks.

Unknown fields are allowed, as in vLLM. Fields that vLLM serves and this server does not are refused by name, so
that no request is answered with something other than what it asked for.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from recipe.policy_cpu.errors import ApiError, FieldError
from recipe.policy_cpu.sampling import GREEDY_BELOW, MAX_LOGPROBS, SamplingParams

# Field → values that ask for nothing. Anything else is refused with 400.
NOT_SERVED: dict[str, tuple] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "use_beam_search": (False,), "min_tokens": (0,), "bad_words": ([],), "allowed_token_ids": ([],), "echo": (False,),
    "structured_outputs": (), "response_format": ({"type": "text"},), "logprob_token_ids": ([],), "suffix": ("",),
    "truncate_prompt_tokens": (), "prompt_embeds": (), "thinking_token_budget": (-1,), "chat_template": (),
    "documents": ([],), "continue_final_message": (False,), "best_of": (1,),
}


class Body(BaseModel):
    model_config = ConfigDict(extra="allow")


class GenerationBody(Body):
    """What chat and text completions share."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_streaming(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("stream_options") and not data.get("stream"):
            raise FieldError("Stream options can only be defined when `stream=True`.", "stream_options")
        return data

    def params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Raises ApiError (400) for values outside vLLM's ranges and for fields that are not served."""
        for name, neutral in NOT_SERVED.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise ApiError(f"`{name}` is not supported by the CPU policy server.", param=name)
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        top_k, min_p = self.top_k or 0, self.min_p or 0.0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        checks = (
            ("temperature", 0 <= temperature <= 2, f"temperature must be in [0, 2], got {temperature}."),
            ("top_p", 0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p}."),
            ("top_k", top_k >= -1, f"top_k must be 0 (disable), or at least 1, got {top_k}."),
            ("min_p", 0 <= min_p <= 1, f"min_p must be in [0, 1], got {min_p}."),
            ("max_tokens", max_tokens >= 1, f"max_tokens must be at least 1, got {max_tokens}."),
            ("stop", all(stop), "stop cannot contain an empty string."),
            ("logprobs", _known_count(logprobs), f"Requested sample logprobs of {logprobs}, which is not in "
             f"0..{MAX_LOGPROBS}, the range allowed."),
            ("prompt_logprobs", _known_count(self.prompt_logprobs), f"Requested prompt logprobs of "
             f"{self.prompt_logprobs}, which is not in 0..{MAX_LOGPROBS}, the range allowed."),
            ("n", self.choices == 1 or temperature >= GREEDY_BELOW,
             f"n must be 1 when using greedy sampling, got {self.n}."),
            ("prompt_logprobs", not (self.stream and self.prompt_logprobs),
             "`prompt_logprobs` are not available when `stream=True`."),
        )
        for name, holds, message in checks:
            if not holds:
                raise ApiError(message, param=name)
        return SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=max(top_k, 0), min_p=min_p,
            seed=self.seed, stop=stop, stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos, include_stop_str=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens, logprobs=logprobs, prompt_logprobs=self.prompt_logprobs)

    @property
    def choices(self) -> int:
        return self.n or 1


def _known_count(count: int | None) -> bool:
    return count is None or 0 <= count <= MAX_LOGPROBS


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = "none"
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    parallel_tool_calls: bool | None = True

    @model_validator(mode="before")
    @classmethod
    def _check_tools(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("tools") == []:
            raise FieldError("`tools` must not be an empty array. Either provide at least one tool or omit the "
                             "field entirely.", "tools")
        if data.get("tools"):
            data = {"tool_choice": "auto", **data}
        elif data.get("tool_choice", "none") not in (None, "none"):
            raise FieldError("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if data.get("top_logprobs") and not data.get("logprobs"):
            raise FieldError("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        return data

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def parses_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice in ("auto", None)


class CompletionBody(GenerationBody):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    add_special_tokens: bool = True


class TokenizeBody(Body):
    """prompt for text, or messages (with tools) for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


class LoadAdapterBody(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(BaseModel):
    lora_name: str
