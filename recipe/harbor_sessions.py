"""Rollouts of the env server for the trainer and the evaluation, through the released openenv package alone.

Training: `HarborSessionFactory` is what TRL's HarnessRolloutWorker asks for (it is picklable and callable):

    factory = HarborSessionFactory.from_settings(settings, "train")
    dataset = Dataset.from_list(factory.prompt_rows())
    worker = HarnessRolloutWorker(harness_session_factory=factory, ...)

Evaluation: `run_eval_rollout(settings, "test", index, model)` runs one task and returns an `EvalRollout`.

What counts as graded is decided in recipe/grading.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from openenv.core.harness import ResourceSession, ResourceSessionFactory, VerifyResult
from openenv.core.harness.training import TrainingTrace
from openenv.harbor.client import HarborEnv
from openenv.harbor.contract import to_training_trace
from openenv.harbor.models import HarborRolloutResult, HarborTaskRef

from recipe.call_times import our_clock
from recipe.config import Settings
from recipe.grading import AGENT_TIMEOUT, EvalRollout, count_tool_calls, eval_outcome, problem_of
from recipe.turn_selection import tool_turns

HARNESS = "opencode"
SETUP_TIMEOUT_S = 1800  # as in recipe/seams.py: sandbox, agent set-up and verifier beside the agent's own time
PAGE = 500  # tasks fetched at once


class UnknownPrompt(LookupError):
    """A prompt that the env server does not serve."""


class RolloutFailed(RuntimeError):
    """The rollout did not run to a grade: TRL leaves it out of its group."""


class RolloutAborted(RolloutFailed):
    """close() was called while the rollout ran."""


def _digest(instruction: str) -> str:
    return hashlib.sha1(instruction.strip().encode()).hexdigest()


class _Client(HarborEnv):
    """HarborEnv whose close() can be awaited: openenv 0.10.0 awaits it when connecting fails, and with the None that
    HarborEnv.close returns the reason (a refused connection, a server at capacity) is lost in a TypeError."""

    def close(self) -> Any:
        self._http.close()
        return super(HarborEnv, self).close()


def _client(env_url: str, agent_timeout: int) -> HarborEnv:
    # The pings of a client on a loaded machine are answered late; the message timeout bounds a rollout anyway.
    return _Client(env_url, message_timeout_s=float(agent_timeout + SETUP_TIMEOUT_S), max_message_size_mb=512.0,
                     websocket_ping_interval_s=None)


class HarborSession(ResourceSession):
    """One training rollout: TRL's TrainableSession, on a client of its own.

    The rollout runs in `wait_for_completion`; `close` may be called from another thread and ends it.
    """

    def __init__(self, factory: HarborSessionFactory, index: int, prompt: list[dict[str, str]]) -> None:
        self._factory, self._index, self._prompt = factory, index, prompt
        self._client: HarborEnv | None = None
        self._ended = threading.Event()
        self._asked = self._received = 0.0  # Unix seconds
        self._closed = False
        self._lock = threading.Lock()
        self.result: HarborRolloutResult | None = None
        self._trace: TrainingTrace | None = None
        self._problem = ""

    def wait_for_completion(self) -> None:
        """Runs the rollout. Raises TimeoutError after an agent timeout (the turns are kept and scored), and
        RolloutFailed when there is nothing that may be scored."""
        try:
            self._complete()
        except (RolloutFailed, TimeoutError) as err:
            self._problem = str(err)
            raise

    def _complete(self) -> None:
        self.result = result = self._run()
        if problem := problem_of(result):
            raise RolloutFailed(f"{result.task_name or 'task ' + str(self._index)} ({result.trial_name}): {problem}")
        try:
            # Here and not in fetch_training_trace, where TRL takes a ValueError for a broken producer and stops.
            self._trace = to_training_trace(result)
        except (ValueError, TypeError, KeyError) as err:
            raise RolloutFailed(f"{result.trial_name}: {err}") from err
        if not any(any(turn.loss_mask) for turn in self._trace.turns):
            raise RolloutFailed(f"{result.trial_name}: no captured token may be trained on")
        if self._factory.train_turns == "tool-calls":
            self._trace = tool_turns(self._trace)  # perhaps none: such a rollout has a reward, but no row
        if result.exception_type == AGENT_TIMEOUT:
            raise TimeoutError(f"{result.trial_name}: {result.error}")

    def _run(self) -> HarborRolloutResult:
        """The blocking call in a thread of its own, so that close() can let its caller go at once."""
        outcome: list[Any] = []

        def call() -> None:
            self._asked = time.time()
            try:
                outcome.append(self._factory.rollout(self._client, self._index))
            except BaseException as err:  # noqa: BLE001 - handed to the waiting thread
                outcome.append(err)
            finally:
                self._received = time.time()
                self._ended.set()

        with self._lock:
            if self._closed:
                raise RolloutAborted("the session is closed")
            self._client = _client(self._factory.env_url, self._factory.agent_timeout)
        threading.Thread(target=call, name="rollout", daemon=True).start()
        self._ended.wait()
        if self._closed:
            raise RolloutAborted("the session was closed while its rollout ran")
        if isinstance(outcome[0], BaseException):
            raise RolloutFailed(f"the env server did not finish the rollout: {outcome[0]!r}") from outcome[0]
        return outcome[0]

    def fetch_training_trace(self) -> TrainingTrace:
        """Token ids, log-probabilities and masks of the agent's turns, exactly as sampled."""
        if self._trace is None:
            raise RolloutFailed("no finished rollout")
        return self._trace

    def verify(self, transcript: list[Any], final_state: Any | None = None) -> VerifyResult:
        """The verifier's reward, as Harbor reported it."""
        if self.result is None:
            return VerifyResult(env_reward=None)
        return VerifyResult(env_reward=self.result.reward, done=True,
                            metrics={"tool_calls": count_tool_calls(self.result), "seconds": self.result.wall_s},
                            artifacts={"trial_name": self.result.trial_name})

    @property
    def call_times(self) -> tuple[float, float] | None:
        """Arrival of the first model call and end of the last one at the capture proxy, in Unix seconds of this
        machine."""
        return our_clock(self.result.phase_timings, self._asked, self._received) if self.result else None

    @property
    def record(self) -> dict[str, Any]:
        """What RUN_DIR/rollouts.jsonl keeps: the trial, and why it is ungraded or what there is to remark."""
        result = self.result or HarborRolloutResult()
        return {"task": result.task_name or self._factory.task_name(self._index), "trial": result.trial_name,
                "seconds": result.wall_s, "reason": self._problem}

    def close(self) -> None:
        """Frees the client; a rollout in flight ends here and, because its socket closes, in the env server."""
        with self._lock:
            client, self._client = self._client, None
            running = client is not None and not self._ended.is_set()
            self._closed = True
        self._ended.set()
        if client is None:
            return
        if running:  # the handshakes of a busy server must not hold up the worker that stops
            threading.Thread(target=_close_quietly, args=(client,), name="rollout-close", daemon=True).start()
        else:
            _close_quietly(client)

    def initial_messages(self) -> list[Any]:
        return list(self._prompt)

    def list_tools(self) -> list[Any]:
        return []  # the agent in the sandbox has its own

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError("the agent in the sandbox calls its own tools")


def _close_quietly(client: HarborEnv) -> None:
    with contextlib.suppress(Exception):  # the server may be gone; nothing depends on a goodbye
        client.close()


@dataclass(frozen=True)
class HarborSessionFactory(ResourceSessionFactory[HarborSession]):
    """Sessions of one split of the env server.

    TRL calls the object with `sampling=` (OpenEnv's full-vocabulary policy) and then `create` with a prompt of
    `prompt_rows`. Tasks are found by the instruction, because only the prompt of a row reaches the factory.
    """

    env_url: str
    split: str
    sandbox: str
    agent_timeout: int  # seconds
    agent_step_limit: int  # model calls
    sampling: Mapping[str, float | int] | None = None
    train_turns: str = "all"  # or "tool-calls"
    _tasks: dict[str, tuple[int, str]] = field(default_factory=dict, repr=False, compare=False)  # digest -> index, name

    @classmethod
    def from_settings(cls, settings: Settings, split: str) -> HarborSessionFactory:
        return cls(settings.env_url, split, settings.sandbox, settings.agent_timeout, settings.max_model_calls,
                   train_turns=settings.train_turns)

    def __call__(self, sampling: Mapping[str, float | int] | None = None) -> HarborSessionFactory:
        return replace(self, sampling=dict(sampling) if sampling is not None else None)

    def prompt_rows(self) -> list[dict[str, Any]]:
        """One row per served task, in the server's order: {"prompt": [user message], "task": name}."""
        rows = []
        for ref in served_tasks(self.env_url, self.split):
            digest = _digest(ref.instruction)
            if digest in self._tasks and self._tasks[digest][0] != ref.index:
                raise ValueError(f"tasks {self._tasks[digest][1]} and {ref.task_name} of split {self.split} have the "
                                 "same instruction, so a prompt does not say which is meant: remove one of them")
            self._tasks[digest] = (ref.index, ref.task_name)
            rows.append({"prompt": [{"role": "user", "content": ref.instruction.strip()}], "task": ref.task_name})
        return rows

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> HarborSession:
        """A session for the task whose instruction is the last user message of `task`. `seed` is TRL's group counter,
        which starts anew after a resume, and is not used. Raises UnknownPrompt."""
        messages = [{"role": "user", "content": task}] if isinstance(task, str) else list(task)
        instruction = next((m["content"] for m in reversed(messages) if m.get("role") == "user"), "")
        if not self._tasks:
            self.prompt_rows()
        found = self._tasks.get(_digest(instruction))
        if found is None:
            raise UnknownPrompt(f"split {self.split} of {self.env_url} serves no task with the instruction "
                                f"{instruction.strip()[:120]!r} ({len(self._tasks)} tasks are served): build the "
                                "dataset from prompt_rows() of the same server")
        return HarborSession(self, found[0], messages)

    def task_name(self, index: int) -> str:
        return next((name for i, name in self._tasks.values() if i == index), f"task {index}")

    def rollout(self, client: HarborEnv, index: int) -> HarborRolloutResult:
        """Blocks for one training rollout of task `index` on `client`."""
        return client.run_rollout(
            split=self.split, task_index=index, harness=HARNESS, sandbox=self.sandbox, purpose="train",
            sampling=dict(self.sampling or {"temperature": 1.0}), agent_timeout_sec=float(self.agent_timeout),
            agent_step_limit=self.agent_step_limit)


def served_tasks(env_url: str, split: str) -> list[HarborTaskRef]:
    """All tasks of a split, in order. Raises LookupError for a split that is not served, OSError without a server."""
    try:
        with _Client(env_url) as env:
            served = {s["name"]: s["num_tasks"] for s in env.splits()}
            if split not in served:
                raise LookupError(f"{env_url} serves the splits {sorted(served)}, not {split!r}")
            return [ref for start in range(0, served[split], PAGE)
                    for ref in env.get_task_range(split, start, min(start + PAGE, served[split]))]
    except (httpx.HTTPError, OSError) as err:
        raise ConnectionError(f"the env server at {env_url} does not answer ({err}): start it with bash serve_env.sh"
                              ) from err


def run_eval_rollout(settings: Settings, split: str, index: int, model: str) -> EvalRollout:
    """Runs task `index` of `split` with `model`, a name that the policy server serves, under the training's sampling,
    output cap, step limit and timeout. Never raises for a rollout that fails: that is an ungraded one."""
    started = time.monotonic()
    client = _client(settings.env_url, settings.agent_timeout)
    try:
        result = client.run_rollout(
            split=split, task_index=index, harness=HARNESS, sandbox=settings.sandbox, purpose="eval",
            # OpenEnv writes "the whole vocabulary" as -1.
            eval_sampling={"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k or -1},
            llm_url=settings.policy_url, model=model, agent_timeout_sec=float(settings.agent_timeout),
            agent_step_limit=settings.max_model_calls)
    except Exception as err:  # noqa: BLE001 - a dead server or socket makes the cell ungraded, with its reason
        return EvalRollout("ungraded", f"the env server did not finish the rollout: {err!r}", None, 0, 0, 0, 0,
                           time.monotonic() - started, "")
    finally:
        _close_quietly(client)
    return eval_outcome(result, time.monotonic() - started, settings.run_path / "trials")
