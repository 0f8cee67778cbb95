"""The reward of one training rollout, by recipe; None leaves it out of its group's baseline, which a 0.0 would not.

RECIPE=smoldataenvs: correctness, and a small bonus for reaching it with few tool calls.

    reward = env_reward + bonus * max(0, (L - tool_calls) / L)    for a correct answer, L = max_model_calls
    reward = env_reward                                           for any other answer
    reward = None                                                 for a rollout that was not graded

Without the bonus a group of eight correct rollouts carries no contrast and tool calls creep up; because it is paid on
correct answers only, giving up early never pays.

RECIPE=deepcoder: every held-out test passes or not, and two penalties against degenerate behaviour.

    reward = -0.1                                                 for an agent that never called bash
    reward = solved - min(0.5, 0.03 * max(0, tool_calls - 20))    else; solved = 1 when all tests pass in time, or 0
    reward = None                                                 for a rollout that was not graded
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

CORRECT = 1.0  # reward that the tasks' verifiers write for a right answer
UNTRIED = -0.1  # a program that its author never ran
FREE_CALLS, PER_CALL, MOST = 20, 0.03, 0.5  # tool calls without penalty, penalty of each further one, of all of them


class GradedRollout(Protocol):
    """The part of TRL's HarnessRolloutOutcome that the reward reads."""

    env_reward: float | None
    tool_call_count: int
    tool_calls_by_name: dict[str, int]
    timed_out: bool


def reward_of(env_reward: float | None, tool_calls: int, bonus: float, max_model_calls: int) -> float | None:
    """Reward of one rollout; None leaves it out of its group's baseline, which a 0.0 would not."""
    if env_reward is None:
        return None
    if env_reward < CORRECT:
        return env_reward
    return env_reward + bonus * max(0.0, (max_model_calls - tool_calls) / max_model_calls)


@dataclass(frozen=True)
class EfficiencyReward:
    """`rollout_reward_fn` of TRL's HarnessRolloutWorker; an object, because the worker is spawned and pickles it."""

    bonus: float
    max_model_calls: int

    def __call__(self, outcome: GradedRollout) -> float | None:
        return reward_of(outcome.env_reward, outcome.tool_call_count, self.bonus, self.max_model_calls)


def deepcoder_reward(outcome: GradedRollout) -> float | None:
    """`rollout_reward_fn` of RECIPE=deepcoder; a function of a module, because the worker is spawned and pickles it."""
    if outcome.env_reward is None:
        return None
    if not outcome.tool_calls_by_name.get("bash"):
        return UNTRIED
    solved = outcome.env_reward >= CORRECT and not outcome.timed_out
    return float(solved) - min(MOST, PER_CALL * max(0, outcome.tool_call_count - FREE_CALLS))


def solved(reward: float, recipe: str) -> bool:
    """Whether a rollout with this reward solved its task; the penalties of RECIPE=deepcoder take at most MOST."""
    return reward >= (CORRECT - MOST if recipe == "deepcoder" else CORRECT)
