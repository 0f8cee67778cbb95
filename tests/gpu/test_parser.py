"""vLLM's own lfm2 tool-call parser on what OpenCode's model writes, and our reading of the same text."""

from __future__ import annotations

import json

import pytest
import vllm
from test_lfm2_calls import test_one_block as table_of_blocks
from transformers import AutoTokenizer

from bench.model import TINY
from recipe.policy_cpu.lfm2_calls import END, START, parse

HEREDOC = "cat > run.py <<'EOF'\nrows = [r for r in open('data.csv')]\nprint(len(rows), {'a': [1, 2]})\nEOF\n"
CALLS = [
    [("bash", {"command": HEREDOC})],
    [("bash", {"command": "awk -F, 'NR>1 {s+=$3} END {print s/(NR-1)}' data.csv"})],
    [("bash", {"command": "echo \"[1, 2]\" > a[0].txt\n\nls -la [ab]*"})],
    [("write", {"filePath": "/workdir/a.py", "content": "def f(x):\n    return '\\n'.join([\"]\", ')'])\n"})],
    [("bash", {"command": "ls"}), ("read", {"filePath": "/workdir/data.csv", "limit": 5}), ("bash", {"command": "id"})],
    [("todowrite", {"todos": [{"content": "look", "done": False, "note": None}]})],
]


@pytest.fixture(scope="module")
def real():
    """Output text → (content, [(name, arguments)]) by vLLM's parser."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.lfm2_tool_parser import Lfm2ToolParser

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    request = ChatCompletionRequest(model="tiny", messages=[{"role": "user", "content": "x"}])

    def read(output: str):
        found = Lfm2ToolParser(tokenizer).extract_tool_calls(output, request)
        return found.content, [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls]

    return read


def mine(output: str):
    content, calls = parse(output)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("calls", CALLS)
def test_calls_come_out_as_they_were_written(real, calls):
    written = ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
    output = f"{START}[{written}]{END}"
    assert real(output) == (None, calls)
    assert mine(output) == real(output)


def test_the_cpu_server_reads_every_text_of_its_table_alike(real):
    """Repairs of broken Python differ between vLLM's versions; ours are those of 0.31."""
    (mark,) = [m for m in table_of_blocks.pytestmark if m.name == "parametrize"]
    differ = {}
    for inside, _ in mark.args[1]:
        output = START + inside + END
        if real(output)[1] != mine(output)[1]:
            differ[inside] = {"vLLM": real(output), "ours": mine(output)}
    print(f"vLLM {vllm.__version__}: {len(differ)} of {len(mark.args[1])} texts are read otherwise: {differ}")
    if vllm.__version__.startswith("0.31."):
        assert not differ
