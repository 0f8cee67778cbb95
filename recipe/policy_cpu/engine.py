"""The scheduler: several completions at once, in a thread of its own.

The thread owns all state. Others hand it functions (`call`), which it runs between two steps, so pausing, loading
weights and aborting need no lock. A step computes one chunk of at most one prompt and one token of every running
completion. Prompts are computed one after the other: rollouts of one group ask for the same prompt at the same
moment, and the second then finds the first one's blocks in the prefix cache. So it is with those that a pause froze.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Generator, Tensor

from recipe.policy_cpu.model import Lfm2Runner, Segment, SequenceState
from recipe.policy_cpu.prefix_cache import PrefixCache
from recipe.policy_cpu.sampling import Ranked, SamplingParams, draw, generator_for, processed_logprobs, rank_tokens
from recipe.policy_cpu.weights import Policy, WeightStore

PauseMode = Literal["abort", "wait", "keep"]


class EngineDead(RuntimeError):
    """A step failed; the weights and states are no longer to be trusted and the server must be restarted."""


@dataclass(eq=False)
class Completion:
    """One completion, from request to result. `done` is set once `finish_reason` is stop, length or abort.

    tokens: the sampled ids, the stop token included. ranked: one entry per token where log-probs were asked for.
    prompt_ranked: one entry per prompt token, the first None. cached: prompt tokens that the prefix cache gave.
    on_token: called in the engine's thread after each token.
    """

    policy: Policy
    prompt: list[int]
    params: SamplingParams
    on_token: Callable[[], None] | None = None
    tokens: list[int] = field(default_factory=list)
    ranked: list[Ranked] = field(default_factory=list)
    prompt_ranked: list[Ranked | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached: int = 0
    done: Future = field(default_factory=Future)
    state: SequenceState | None = None
    generator: Generator | None = None
    root: bytes = b""
    chain: bytes = b""

    @property
    def computed(self) -> bool:
        """Whether the next token may be drawn: all before it are in the state."""
        return self.state.length == len(self.prompt) + len(self.tokens)

    @property
    def prefilling(self) -> bool:
        """More is to be computed than the token that was drawn last: the prompt, or all once more after a pause."""
        return self.state is not None and self.state.length < len(self.prompt) + max(len(self.tokens) - 1, 0)


class Engine:
    """eos_id stops without a stop_reason; extra_stop_ids (generation_config's other ids) stop with their id.

    decode: token ids → text, special tokens kept; used for stop strings only. on_death: called when a step failed.
    """

    def __init__(self, runner: Lfm2Runner, store: WeightStore, cache: PrefixCache, *, eos_id: int | None,
                 extra_stop_ids: frozenset[int], decode: Callable[[list[int], bool], str],
                 max_running: int = 16, chunk: int = 512, on_death: Callable[[], None] = lambda: None) -> None:
        self.runner, self.store, self.cache = runner, store, cache
        self.eos_id, self.extra_stop_ids, self.decode = eos_id, extra_stop_ids, decode
        self.max_running, self.chunk, self.on_death = max_running, chunk, on_death
        self.paused: PauseMode | None = None
        self.failure: BaseException | None = None
        self.waiting: deque[Completion] = deque()
        self.running: list[Completion] = []
        self._pausing: list[tuple[Future, bool]] = []
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- for other threads ----------------------------------------------------------------------------------------
    def call(self, function: Callable[[], Any]) -> Future:
        """Runs `function` in the engine's thread between two steps; the future has its result or exception."""
        future: Future = Future()
        self._inbox.put((function, future))
        if self.failure is not None:  # nobody will read the inbox again
            self._refuse_inbox()
        return future

    def submit(self, completion: Completion) -> None:
        """Raises EngineDead when a step has failed; one that fails before it has taken the completion ends it."""
        def refused(accepted: Future) -> None:
            if error := accepted.exception():
                completion.done.set_exception(error)

        accepted = self.call(lambda: self.waiting.append(completion))
        accepted.add_done_callback(refused)
        if self.failure is not None and (error := accepted.exception()):
            raise error

    def abort(self, completion: Completion) -> Future:
        return self.call(lambda: completion.finish_reason or self._finish(completion, "abort"))

    def pause(self, mode: PauseMode, clear_cache: bool) -> Future:
        """keep: running completions freeze between two tokens; wait: they finish first; abort: they end now.

        New requests wait in every mode. The future is done when nothing runs any more. With `clear_cache`, as in vLLM,
        frozen completions lose what was computed of them, and go on by the weights of that time.
        """
        done: Future = Future()
        asked = self.call(lambda: self._pause(mode, clear_cache, done))
        return asked if asked.done() and asked.exception() else done

    def resume(self) -> Future:
        return self.call(lambda: setattr(self, "paused", None))

    def close(self) -> None:
        self.call(lambda: setattr(self, "_stopping", True))
        self._thread.join(timeout=10)

    # -- the engine's thread --------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._stopping:
                self._drain(wait=not self._runnable())
                if self._runnable():
                    self._step()
                self._settle_pauses()
        except BaseException as error:  # noqa: BLE001 - whatever it was, every waiting client must hear of it
            self.failure = error
            self.on_death()
        if self.failure is not None:
            for completion in (*self.running, *self.waiting):
                completion.done.set_exception(self._dead())
            for done, _ in self._pausing:
                done.set_exception(self._dead())
            self._refuse_inbox()

    def _dead(self) -> EngineDead:
        return EngineDead(f"the engine has stopped: {self.failure!r}")

    def _refuse_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()[1].set_exception(self._dead())

    def _drain(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            function, future = self._inbox.get()
            wait = False
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it belongs to the caller, who gets it from the future
                future.set_exception(error)

    def _runnable(self) -> bool:
        if self.paused == "keep":
            return False
        return bool(self.running or (self.waiting and self.paused is None))

    def _pause(self, mode: PauseMode, clear_cache: bool, done: Future) -> None:
        self.paused = mode
        if mode == "abort":
            for completion in (*self.running, *self.waiting):
                self._finish(completion, "abort")
        self._pausing.append((done, clear_cache))

    def _settle_pauses(self) -> None:
        if self.paused in (None, "keep") or not self.running:
            for done, clear_cache in self._pausing:
                if clear_cache:
                    self.cache.clear()
                    for completion in self.running:
                        completion.state = None
                done.set_result(None)
            self._pausing.clear()

    def _step(self) -> None:
        if not any(c.prefilling for c in self.running):
            if frozen := next((c for c in self.running if c.state is None), None):
                self._begin(frozen)
            elif self.paused is None and self.waiting and len(self.running) < self.max_running:
                self._start(self.waiting.popleft())
        computing = [c for c in self.running if c.state is not None]
        for weights in {id(c.policy.weights): c.policy.weights for c in computing}.values():
            group = [c for c in computing if c.policy.weights is weights]
            group.sort(key=lambda c: c.prefilling)  # those that decode, one token each, come first
            segments = [Segment(c.state, self._next_tokens(c)) for c in group]
            hidden = self.runner.forward(weights, segments)
            end = 0
            for completion, segment in zip(group, segments, strict=True):
                begin, end = end, end + len(segment.tokens)
                self._store_blocks(completion)
                if completion.params.prompt_logprobs is not None and not completion.tokens:
                    self._rank_prompt(completion, self.runner.logits(weights, hidden[begin:end]), len(segment.tokens))
            ready = [(c, end) for c, end in zip(group, _ends(segments), strict=True) if c.computed]
            if ready:
                logits = self.runner.logits(weights, hidden[[end - 1 for _, end in ready]])
                for (completion, _), row in zip(ready, logits, strict=True):
                    self._sample(completion, row)

    def _start(self, completion: Completion) -> None:
        completion.generator = generator_for(completion.params.seed)
        self._begin(completion)
        completion.cached = completion.state.length
        self.running.append(completion)

    def _begin(self, completion: Completion) -> None:
        """An empty state, or what the cache knows of it."""
        params, known = completion.params, completion.prompt + completion.tokens
        completion.state = self.runner.new_state(len(completion.prompt) + min(params.max_tokens, 256))
        completion.root = completion.chain = completion.policy.weights.key
        if params.prompt_logprobs is None:  # they need every position's logits, which the cache does not have
            completion.chain = self.cache.restore(completion.root, known, completion.state)
        elif not completion.tokens:
            completion.prompt_ranked = [None]

    def _next_tokens(self, completion: Completion) -> list[int]:
        if completion.prefilling:
            start = completion.state.length
            return (completion.prompt + completion.tokens)[start : start + self.chunk]
        return completion.tokens[-1:]

    def _store_blocks(self, completion: Completion) -> None:
        """New full blocks go to the prefix cache.

        Not those of a completion whose weights changed while it ran: their chain begins at the old weights' root, so
        nobody could ever ask for them.
        """
        state = completion.state
        if not state.boundaries:
            return
        if completion.policy.weights.key == completion.root:
            tokens = completion.prompt + completion.tokens
            for end in sorted(state.boundaries):
                block = tokens[end - self.cache.block : end]
                completion.chain = self.cache.store(completion.chain, block, state, end)
        state.boundaries.clear()

    def _rank_prompt(self, completion: Completion, logits: Tensor, count: int) -> None:
        start = completion.state.length - count
        following = completion.prompt[start + 1 : start + 1 + count]
        for row, token in zip(logits.log_softmax(-1), following, strict=False):
            completion.prompt_ranked.append(rank_tokens(row, token, completion.params.prompt_logprobs))

    def _sample(self, completion: Completion, logits: Tensor) -> None:
        params = completion.params
        logprobs = processed_logprobs(logits, params)
        token = draw(logprobs, params, completion.generator)
        completion.tokens.append(token)
        if params.logprobs is not None:
            completion.ranked.append(rank_tokens(logprobs, token, params.logprobs))
        stop_ids = params.stop_token_ids | (frozenset() if params.ignore_eos else self.extra_stop_ids)
        if token == self.eos_id and not params.ignore_eos:
            self._finish(completion, "stop")
        elif token in stop_ids:
            self._finish(completion, "stop", token)
        elif found := self._stop_string(completion):
            self._finish(completion, "stop", found)
        elif len(completion.tokens) >= params.max_tokens:
            self._finish(completion, "length")
        if completion.on_token is not None:
            completion.on_token()

    def _stop_string(self, completion: Completion) -> str | None:
        if not completion.params.stop:
            return None
        text = self.decode(completion.tokens, completion.params.skip_special_tokens)
        found = [(text.find(stop), stop) for stop in completion.params.stop if stop in text]
        return min(found)[1] if found else None

    def _finish(self, completion: Completion, reason: str, stop_reason: int | str | None = None) -> None:
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        if completion in self.running:
            self.running.remove(completion)
        elif completion in self.waiting:
            self.waiting.remove(completion)
        completion.state = None  # frees the keys and values at once
        completion.done.set_result(None)


def _ends(segments: list[Segment]) -> list[int]:
    ends, end = [], 0
    for segment in segments:
        end += len(segment.tokens)
        ends.append(end)
    return ends
