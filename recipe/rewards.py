"""The reward of one training rollout: correctness, and a small bonus for reaching it with few tool calls.

    reward = env_reward + bonus * max(0, (L - tool_calls) / L)    for a correct answer, L = max_model_calls
    reward = env_reward                                           for any other answer
    reward = None                                                 for a rollout that was not graded

Without the bonus a group of eight correct rollouts carries no contrast and tool calls creep up; because it is paid on
correct answers only, giving up early never pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

CORRECT = 1.0  # reward that the tasks' verifiers write for a right answer


class GradedRollout(Protocol):
    """The part of TRL's HarnessRolloutOutcome that the reward reads."""

    env_reward: float | None
    tool_call_count: int


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
