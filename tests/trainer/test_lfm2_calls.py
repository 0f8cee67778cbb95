"""Tool calls in model output are read as vLLM's lfm2 parser reads them, surprises included."""

from __future__ import annotations

import json

import pytest

from recipe.policy_cpu.lfm2_calls import END, START, parse


def calls(inside: str) -> list[tuple[str, dict]] | None:
    """(name, arguments) of each call between the sentinels; None when the output stays text."""
    output = START + inside + END
    content, found = parse(output)
    if not found:
        assert content == output, "what is no call stays as it is, sentinels included"
        return None
    assert content is None
    return [(call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize("inside, expected", [
    ('[bash(command="ls -la")]', [("bash", {"command": "ls -la"})]),
    ("[bash(command='ls'), read(path='a.txt', limit=3)]",
     [("bash", {"command": "ls"}), ("read", {"path": "a.txt", "limit": 3})]),
    (" \n[f()]\n ", [("f", {})]),
    ("[f(a=-1, b=+2.5, c=true, d=False, e=null, g=None)]",
     [("f", {"a": -1, "b": 2.5, "c": True, "d": False, "e": None, "g": None})]),
    ("[f(a=[1, 'x'], b={'k': [null]}, c=(1, 2), d={'s'})]",
     [("f", {"a": [1, "x"], "b": {"k": [None]}, "c": [1, 2], "d": ["s"]})]),
    ("[a.b.c(x=1)]", [("a.b.c", {"x": 1})]),
    ("[f(x='''two\nlines''')]", [("f", {"x": "two\nlines"})]),
    ("[f(x=f'plain')]", [("f", {"x": "plain"})]),
    ("[f(x='ä€')]", [("f", {"x": "ä€"})]),
    # repairs: line breaks in strings, reserved words as names, padded numbers, nested quotes
    ("[bash(command='cat <<EOF\na\tb\nEOF')]", [("bash", {"command": "cat <<EOF\na\tb\nEOF"})]),
    ("[get(from=1, class='x', to='from=2')]", [("get", {"from": 1, "class": "x", "to": "from=2"})]),
    ("[date(month=07, year=2024, rate=0.5, zero=00, text='07')]",
     [("date", {"month": 7, "year": 2024, "rate": 0.5, "zero": 0, "text": "07"})]),
    ("[bash(command='sed -n '360,450p' f.py')]", [("bash", {"command": "sed -n '360,450p' f.py"})]),
    ('[bash(command="python3 -c "print(1)"", timeout=5)]',
     [("bash", {"command": 'python3 -c "print(1)"', "timeout": 5})]),
    (r"[bash(command='grep \d+ a\tb')]", [("bash", {"command": "grep \\d+ a\tb"})]),  # Python's escapes apply
    # surprises that are kept
    ("[bash('ls')]", [("bash", {})]),  # positional arguments are dropped
    ("[f(a=1)(b=2)]", None), ("[f(x=1+2)]", None), ("[f(x=f'{y}')]", None), ("[f(x=y)]", None), ("[f(x=-'a')]", None),
    ("f(x=1)", None), ("[]", None), ("[1]", None), ("[f(x=1), 2]", None), ('{"name": "f"}', None), ("", None),
    ("[f(x='open)]", None), ("[my-tool(x=1)]", None), ("[f(my-arg=1)]", None), ("```python\n[f()]\n```", None),
    ("[f(x=1j)]", None), ("[f(x=b'1')]", None), ("[f(x=...)]", None), ("[f(a=1, a=2)]", [("f", {"a": 2})]),
])
def test_one_block(inside, expected):
    assert calls(inside) == expected


@pytest.mark.parametrize("output, content", [
    ("no call at all", "no call at all"), ("", ""),
    (f"before {START}[f()]{END} after", "before\nafter"),
    (f"{START}[f()]", None),  # a complete list needs no end sentinel
    (f"{START}[f()]{END}[f()]{END}", None),  # an echo of the block
    (f"{START}[f()]{END}[f()]{END}text", "text"),
    (f"{START}[f()]{END}{START}[g()]{END}", None),  # only the first block counts
])
def test_text_around_the_block(output, content):
    found = parse(output)
    assert found[0] == content
    assert [call.name for call in found[1]] == (["f"] if START in output else [])
