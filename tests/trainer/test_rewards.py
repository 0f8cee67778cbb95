"""The reward table of the recipe, and its transport into TRL's spawned worker."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from recipe.rewards import EfficiencyReward, reward_of

TABLE = [  # env_reward, tool calls, reward
    (1.0, 0, 1.1), (1.0, 1, 1.096875), (1.0, 8, 1.075), (1.0, 16, 1.05), (1.0, 31, 1.003125), (1.0, 32, 1.0),
    (1.0, 50, 1.0),  # beyond the limit the bonus ends, it does not turn into a penalty
    (0.0, 0, 0.0), (0.0, 5, 0.0), (0.0, 40, 0.0),  # giving up early does not pay
    (0.5, 1, 0.5),  # part of an answer is not a correct one
    (None, 0, None), (None, 7, None),  # ungraded is not wrong
]


@pytest.mark.parametrize(("env_reward", "tool_calls", "expected"), TABLE)
def test_reward_table(env_reward, tool_calls, expected):
    reward = reward_of(env_reward, tool_calls, bonus=0.1, max_model_calls=32)
    assert reward is None if expected is None else reward == pytest.approx(expected, abs=1e-12)


def test_bonus_and_limit_come_from_the_settings():
    assert reward_of(1.0, 2, bonus=0.4, max_model_calls=4) == pytest.approx(1.2)
    assert reward_of(1.0, 2, bonus=0.0, max_model_calls=4) == 1.0


def test_reward_of_an_outcome_after_pickling():
    reward = pickle.loads(pickle.dumps(EfficiencyReward(0.1, 32)))
    assert reward(SimpleNamespace(env_reward=1.0, tool_call_count=16)) == pytest.approx(1.05)
    assert reward(SimpleNamespace(env_reward=None, tool_call_count=16)) is None


def test_trl_hands_over_the_fields_that_the_reward_reads():
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutOutcome
    outcome = HarnessRolloutOutcome(env_reward=1.0, completion=[], trace=[], tool_call_count=8, tool_failure_count=0,
                                    tool_calls_by_name={}, timed_out=False)
    assert EfficiencyReward(0.1, 32)(outcome) == pytest.approx(1.075)
