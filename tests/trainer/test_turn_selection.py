"""TRAIN_TURNS=tool-calls: which turns of a captured rollout carry loss."""

from __future__ import annotations

from openenv.core.harness.training import TrainingTrace
from openenv.harbor.contract import to_training_trace
from openenv.harbor.models import HarborRolloutResult, HarborTurn
from trl.experimental.async_grpo.async_rollout_worker import _chain_to_sequences
from trl.experimental.async_grpo.openenv_harness import _turns_from_training_trace

from recipe.harbor_sessions import HarborSessionFactory
from recipe.turn_selection import tool_turns

TOOLS = [{"type": "function", "function": {"name": "bash"}}]


def turn(number: int, prompt: list[int], *, system: str = "You are opencode", tools: list | None = TOOLS,
         calls: tuple[str, ...] = (), **more) -> HarborTurn:
    return HarborTurn(**dict(
        turn=number, node_id=f"n{number}", prompt_token_ids=prompt, completion_token_ids=[10 * number, 10 * number + 1],
        per_token_logps=[-0.1, -0.2], loss_mask=[0] * len(prompt) + [1, 1], request_tools=tools,
        request_messages=[{"role": "system", "content": system}, {"role": "user", "content": "Solve it"}],
        tool_calls=[{"name": name, "arguments": "{}"} for name in calls]) | more)


def trace(*turns: HarborTurn) -> TrainingTrace:
    return to_training_trace(HarborRolloutResult(reward=1.0, rollout_type="train", capture_level="tokens",
                                                 turns=list(turns)))


TITLE = turn(1, [1, 2], system="You make titles", tools=None)
WRITES = turn(2, [1, 3], calls=("write",))
TALKS = turn(3, [1, 3, 20, 21, 4])
TESTS = turn(4, [1, 3, 20, 21, 4, 30, 31, 5], calls=("bash", "bash"))
SUMMARY = turn(5, [1, 6], system="You summarize conversations")
ENDS = turn(6, [1, 3, 20, 21, 4, 30, 31, 5, 40, 41, 7])


def test_only_the_agents_own_tool_turns_carry_loss():
    selected = tool_turns(trace(TITLE, WRITES, TALKS, TESTS, SUMMARY, ENDS))
    assert {t.node_id: t.loss_mask for t in selected.turns} == {
        "n2": [0, 0, 1, 1], "n3": [0] * 7, "n4": [0] * 8 + [1, 1], "n6": [0] * 13}


def test_what_openenv_calls_auxiliary_was_never_there():
    auxiliary = [t.model_copy(update={"role": "auxiliary"}) for t in (TITLE, SUMMARY)]
    assert tool_turns(trace(auxiliary[0], WRITES, TESTS, auxiliary[1])) == tool_turns(trace(WRITES, TESTS))


def test_prose_stays_as_context_in_the_row_that_is_trained():
    """The last answer, after which no turn with a tool call comes, is in no row that needs it and carries no loss."""
    turns = _turns_from_training_trace(tool_turns(trace(TITLE, WRITES, TALKS, TESTS, SUMMARY, ENDS)))
    (row,), _ = _chain_to_sequences(turns, "rollout", 1024)
    assert row.input_ids == [1, 3, 20, 21, 4, 30, 31, 5, 40, 41, 7, 60, 61]
    assert row.completion_mask == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0]


def test_a_mask_that_is_zero_already_stays_so_and_nothing_is_invented():
    masked = WRITES.model_copy(update={"loss_mask": [0, 0, 0, 1]})
    assert tool_turns(trace(masked, TALKS)).turns[0].loss_mask == [0, 0, 0, 1]
    assert [any(t.loss_mask) for t in tool_turns(trace(TALKS, ENDS)).turns] == [False, False]
    assert tool_turns(trace(TITLE)).turns == []


def test_it_is_asked_for_by_the_setting():
    from recipe.config import Settings
    assert HarborSessionFactory.from_settings(Settings.load({}), "train").train_turns == "all"
    deepcoder = Settings.load({"RECIPE": "deepcoder"})
    assert HarborSessionFactory.from_settings(deepcoder, "train").train_turns == "tool-calls"
