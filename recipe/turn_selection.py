"""Which turns of a rollout carry loss, as masks of its TrainingTrace (TRAIN_TURNS).

OpenEnv's export already leaves out what it knows to be auxiliary. `tool_turns` does not rely on that: OpenCode asks for
a title and for summaries with another system prompt or without tools, and its own loop has one of both.
"""

from __future__ import annotations

from typing import Any

from openenv.core.harness.training import TrainingTrace, TrainingTurn


def tool_turns(trace: TrainingTrace) -> TrainingTrace:
    """`trace` with the agent's own turns alone, those without a tool call as context: their mask is zero."""
    return TrainingTrace(turns=[
        turn if calls_tool(turn) else turn.model_copy(update={"loss_mask": [0] * len(turn.loss_mask)})
        for turn in own_turns(trace.turns)])


def own_turns(turns: list[TrainingTurn]) -> list[TrainingTurn]:
    """Turns with tools and with the system prompt of the first such turn."""
    with_tools = [turn for turn in turns if turn.request.get("tools")]
    return [turn for turn in with_tools if system_prompt(turn) == system_prompt(with_tools[0])]


def calls_tool(turn: TrainingTurn) -> bool:
    message = (turn.response.get("choices") or [{}])[0].get("message") or {}
    return bool(message.get("tool_calls"))


def system_prompt(turn: TrainingTurn) -> Any:
    return next((m.get("content") for m in turn.request.get("messages") or () if m.get("role") == "system"), None)
