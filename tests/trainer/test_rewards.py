"""The reward table of the recipe, and its transport into TRL's spawned worker."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from recipe.rewards import EfficiencyReward, deepcoder_reward, reward_of

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


DEEPCODER = [  # fraction of the tests, calls by tool, agent timeout, reward
    (1.0, {"bash": 1}, False, 1.0), (1.0, {"bash": 3, "write": 17}, False, 1.0),
    (0.916667, {"bash": 2}, False, 0.0), (0.0, {"bash": 2}, False, 0.0), (1.0, {"bash": 2}, True, 0.0),
    (1.0, {"bash": 1, "write": 20}, False, 0.97), (1.0, {"bash": 30}, False, 0.7), (0.5, {"bash": 30}, False, -0.3),
    (1.0, {"bash": 36, "edit": 1}, False, 0.5), (1.0, {"bash": 60}, False, 0.5), (0.0, {"bash": 200}, True, -0.5),
    (1.0, {"write": 2}, False, -0.1), (0.0, {}, False, -0.1), (1.0, {"edit": 90}, True, -0.1),
    (0.0, {"bash": 0}, False, -0.1),
    (None, {"bash": 4}, False, None), (None, {}, True, None),
]


@pytest.mark.parametrize(("fraction", "calls", "timed_out", "expected"), DEEPCODER)
def test_deepcoder_reward_table(fraction, calls, timed_out, expected):
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutOutcome
    outcome = HarnessRolloutOutcome(env_reward=fraction, completion=[], trace=[], tool_call_count=sum(calls.values()),
                                    tool_failure_count=0, tool_calls_by_name=calls, timed_out=timed_out)
    reward = pickle.loads(pickle.dumps(deepcoder_reward))(outcome)
    assert reward is None if expected is None else reward == pytest.approx(expected, abs=1e-12)


def test_trl_hands_over_the_fields_that_the_reward_reads():
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutOutcome
    outcome = HarnessRolloutOutcome(env_reward=1.0, completion=[], trace=[], tool_call_count=8, tool_failure_count=0,
                                    tool_calls_by_name={}, timed_out=False)
    assert EfficiencyReward(0.1, 32)(outcome) == pytest.approx(1.075)


def test_trl_and_the_evaluation_count_the_same_tool_calls():
    from openenv.harbor.contract import to_training_trace
    from openenv.harbor.models import HarborRolloutResult, HarborTurn
    from trl.experimental.async_grpo.openenv_harness import _tool_call_counts_by_name

    from recipe.grading import count_tool_calls

    def turn(number: int, tools: list[str], **more) -> HarborTurn:
        return HarborTurn(**dict(turn=number, node_id=f"n{number}", prompt_token_ids=[1], completion_token_ids=[2, 3],
                                 per_token_logps=[-0.1, -0.2], loss_mask=[0, 1, 1],
                                 tool_calls=[{"name": name, "arguments": "{}"} for name in tools]) | more)

    masked = dict(trainable=False, loss_mask=[0, 0, 0])  # context only: sampled, but not to be trained on
    result = HarborRolloutResult(reward=1.0, rollout_type="train", capture_level="tokens", turns=[
        turn(0, ["bash"]), turn(1, ["bash", "read"]), turn(2, ["write"], **masked), turn(3, [""]), turn(4, []),
        turn(5, ["bash"], discarded=True), turn(6, ["bash"], role="auxiliary")])
    by_name = _tool_call_counts_by_name(to_training_trace(result).to_trace_entries())
    assert by_name == {"bash": 2, "read": 1, "write": 1}
    assert sum(by_name.values()) == count_tool_calls(result) == 4
