"""Tool calls from sampled text to OpenCode's arguments and back into the next prompt: exact, or a counted fork."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

from recipe.policy_cpu.chat import Text
from recipe.policy_cpu.lfm2_calls import END, START, parse

EXAMPLES = settings(max_examples=500)
HEREDOC = "cat > a.py <<'EOF'\nprint(\"[1, (2)]\", '\\n')\n\tif x == '': pass\nEOF\npython3 a.py | sed -n '1,9p'\n"
PIECES = st.sampled_from(["'", '"', "\\", "\n", "\r\n", "\t", "[", "](", ")", "]", ", from=1", "#", "{}", "<<EOF", "é",
                          "€", "日", "$(x)", "`", "'''", '"""', " ", "f'{a}'", "0", "\\n", "=", HEREDOC, "\x00", "%s"])
# no text of a special token: a model cannot write one inside a string without ending it
STRINGS = st.one_of(st.lists(st.one_of(PIECES, st.text(max_size=6)), max_size=8).map("".join),
                    st.text(max_size=30)).filter(lambda s: "<|" not in s).map(
    lambda s: s.encode("utf-8", "ignore").decode())
VALUES = st.one_of(STRINGS, st.integers(-10**9, 10**9), st.booleans(), st.none(), st.lists(STRINGS, max_size=3))
NAMES = st.sampled_from(["command", "filePath", "content", "oldString", "description", "timeout", "offset"])
CALLS = st.lists(st.tuples(st.sampled_from(["bash", "read", "write", "edit"]),
                           st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3)
Call = tuple[str, dict]


def written(calls: list[Call]) -> str:
    """The calls as Python writes their literals, which is what the format is."""
    inside = ", ".join(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                       for name, arguments in calls)
    return f"{START}[{inside}]{END}"


def read(text: str) -> list[Call]:
    content, found = parse(text)
    assert content is None, content
    return [(call.name, json.loads(call.arguments)) for call in found]


@EXAMPLES
@given(CALLS)
def test_calls_survive_render_parse_render(calls):
    assert read(written(calls)) == calls
    assert written(read(written(calls))) == written(calls)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "tiny/model"))


def two_turns(text: Text, sampled: str) -> list[TurnRecord]:
    """The model writes `sampled`, the agent runs it, and the second prompt is rendered as the server renders it."""
    messages = [{"role": "system", "content": "You use tools."}, {"role": "user", "content": "Do it."}]
    first = text.render(messages)
    output = [*text.encode(sampled, False), text.tokenizer.eos_token_id]
    _, found = parse(sampled)
    calls = [{"id": str(i), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
             for i, c in enumerate(found)]
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok\n"} for call in calls]
    second = text.render(messages)
    return [TurnRecord(first, output, [0.0] * len(output)), TurnRecord(second, [9, 7], [0.0, 0.0])]


@EXAMPLES
@given(CALLS)
def test_next_prompt_begins_with_what_was_sampled_or_a_fork_is_counted(text, calls):
    """The template quotes strings in its own way, so another way of writing them forks. Nothing is trained on tokens
    that were not sampled, and nothing that was sampled is lost."""
    first, second = two_turns(text, written(calls))
    held = first.prompt_ids + first.output_ids
    exact = second.prompt_ids[:len(held)] == held
    rows, tally = _chain_to_sequences([first, second], "rollout", 0)
    assert (tally["clean"], tally["fork"], tally["realign"]) == (exact, not exact, 0) and len(rows) == 2 - exact
    trained = [[t for t, m in zip(row.input_ids, row.completion_mask, strict=True) if m] for row in rows]
    assert [t for row in trained for t in row] == first.output_ids + second.output_ids


@pytest.mark.parametrize("value", [
    "ls -la", "cat > a.py <<EOF\nprint([1, (2)])\n\tx = {\"a\": 1}\nEOF", "grep \"a, b\" data.csv | head -3",
    "é€日 [x](y)", "awk -F, \"NR>1 {s+=$3}\"", "", "a=1, from=2", "# comment\n\n"])
def test_calls_in_the_templates_own_style_are_token_exact(text, value):
    """Heredocs, brackets, double quotes and line breaks, written as the template writes them: no fork."""
    first, second = two_turns(text, f"{START}[bash(command='{value}', timeout=30)]{END}")
    held = first.prompt_ids + first.output_ids
    assert second.prompt_ids[:len(held)] == held
    assert _chain_to_sequences([first, second], "rollout", 0)[1]["fork"] == 0
