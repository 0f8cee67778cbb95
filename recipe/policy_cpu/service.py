"""What the routes share: the engine with its policies, and how a request becomes completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from recipe.policy_cpu.chat import Text
from recipe.policy_cpu.engine import Completion, Engine
from recipe.policy_cpu.errors import ApiError
from recipe.policy_cpu.protocol import GenerationBody
from recipe.policy_cpu.sampling import SamplingParams
from recipe.policy_cpu.weights import Policy, WeightStore


@dataclass(eq=False)
class Service:
    """tokens_as_ids: log-prob tokens read `token_id:N` unless a request says otherwise."""

    engine: Engine
    store: WeightStore
    text: Text
    model_path: str
    max_model_len: int
    dtype: str
    enable_lora: bool = False
    dev_mode: bool = False
    tokens_as_ids: bool = True
    started: int = field(default_factory=lambda: int(time.time()))

    def policy(self, name: str | None) -> Policy:
        """The base for its own name or none, an adapter for the adapter's. Raises ApiError (404)."""
        if not name or name == self.store.base.name:
            return self.store.base
        if name in self.store.adapters:
            return self.store.adapters[name]
        raise ApiError(f"The model `{name}` does not exist.", "NotFoundError", 404, "model")

    def output_room(self, prompt: list[int], wanted: int | None) -> int:
        """Output tokens that a prompt may have. Raises ApiError (400) when prompt and output do not fit."""
        total, vocabulary = len(prompt) + (wanted or 0), self.store.base.weights.embed.shape[0]
        if total > self.max_model_len:
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{wanted or 0} output tokens and your prompt contains {len(prompt)} input tokens, for a total of "
                f"{total} tokens. Please reduce the length of the input prompt or the number of requested output "
                "tokens.", param="input_tokens")
        if not prompt:
            raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        if not all(0 <= token < vocabulary for token in prompt):
            raise ApiError(f"Token id {max(prompt)} is out of vocabulary.", param="prompt")
        return self.max_model_len - len(prompt) if wanted is None else wanted

    def completions(self, body: GenerationBody, policy: Policy, prompt: list[int],
                    params: SamplingParams) -> list[Completion]:
        """`n` completions, not yet submitted; a seed is counted up so that they differ."""
        seeds = [None if params.seed is None else params.seed + i for i in range(body.choices)]
        return [Completion(policy, prompt, SamplingParams(**{**params.__dict__, "seed": seed})) for seed in seeds]

    async def run(self, request: Request, completions: list[Completion]) -> bool:
        """Submits and waits. False when the client went away: its completions are aborted, their slots free.

        Raises EngineDead when a step fails.
        """
        for completion in completions:
            self.engine.submit(completion)
        finished = asyncio.gather(*(asyncio.wrap_future(c.done) for c in completions))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
            if finished.done():
                await finished
                return True
            return False
        finally:
            gone.cancel()
            for completion in completions:
                if not completion.done.done():
                    self.engine.abort(completion)

    async def in_engine(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.engine.call(function))

    def usage(self, prompts: list[list[int]], completions: list[Completion]) -> dict[str, Any]:
        read, written = sum(map(len, prompts)), sum(len(c.tokens) for c in completions)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
                "prompt_tokens_details": {"cached_tokens": completions[0].cached}}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
