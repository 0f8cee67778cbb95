"""Which rollouts count, and what is counted in them: one judgement for the reward and for the evaluation.

A rollout that did not run is ungraded, never wrong: Harbor's verifier runs even when the agent was refused by the proxy
or died, and its 0.0 says nothing about the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from openenv.harbor.models import HarborRolloutResult, HarborTurn

from recipe import phases
from recipe.call_times import MODEL_SECONDS

AGENT_TIMEOUT = "AgentTimeoutError"  # Harbor's exception of an agent that ran out of time


def count_tool_calls(result: HarborRolloutResult) -> int:
    """Tool calls in the agent's captured turns: the count of the reward and of the evaluation.

    The turns and calls are those of `to_training_trace`, so TRL's own count of a trace is the same number.
    """
    return sum(1 for turn in _agent_turns(result) for call in turn.tool_calls if call.get("name"))


def problem_of(result: HarborRolloutResult) -> str | None:
    """Why a rollout must not be graded, or None. An agent that ran out of time is graded on what it left."""
    if not any(turn.completion_token_ids or turn.text or turn.tool_calls for turn in _agent_turns(result)):
        return f"the agent's model calls were not captured: {result.error or 'none reached the proxy'}"
    if result.capture_level != "tokens":
        return (f"the engine was graded {result.capture_level!r} when it was probed, not \"tokens\": restart the env "
                "server once the policy server answers")
    if result.exception_type and result.exception_type != AGENT_TIMEOUT:
        return f"{result.exception_type}: {result.error}"
    if fatal := [finding for finding in result.findings if "[FATAL" in finding]:
        return fatal[0]
    if result.reward is None:
        return f"the verifier gave no reward{': ' + result.error if result.error else ''}"
    if not result.ok and not result.exception_type:
        return result.error or "the rollout failed without a reason"
    return None


def _agent_turns(result: HarborRolloutResult) -> list[HarborTurn]:
    return [turn for turn in result.turns if turn.role == "agent" and not turn.discarded]


@dataclass(frozen=True)
class EvalRollout:
    """One evaluation rollout. `reason` says why it is ungraded, or remarks on a graded one."""

    status: str  # "graded" or "ungraded"
    reason: str
    reward: float | None
    tool_calls: int
    model_calls: int
    tokens: int  # sampled by the model
    prompt_tokens: int  # summed over the calls
    seconds: float
    trial_name: str
    timed_out: bool = False
    phases: dict[str, float] = field(default_factory=dict)  # seconds: recipe/phases.py


def eval_outcome(result: HarborRolloutResult, seconds: float, trials: Path) -> EvalRollout:
    """What an evaluation keeps of a rollout that took `seconds` and left its record in the folder `trials`."""
    turns = _agent_turns(result)
    problem = problem_of(result)
    timed_out = result.exception_type == AGENT_TIMEOUT
    return EvalRollout(
        status="ungraded" if problem else "graded",
        reason=problem or ("agent timeout" if timed_out else ""),
        reward=None if problem else result.reward,
        tool_calls=count_tool_calls(result),
        model_calls=len(turns),
        tokens=sum(len(turn.completion_token_ids) for turn in turns),
        prompt_tokens=sum(len(turn.prompt_token_ids) for turn in turns),
        seconds=seconds, trial_name=result.trial_name, timed_out=timed_out,
        phases=phases.of_trial(trials / result.trial_name, result.phase_timings.get(MODEL_SECONDS, 0.0)))
