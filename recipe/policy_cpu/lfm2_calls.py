"""Reads the tool calls in what an LFM2.5 model wrote, with the results of vLLM 0.31's `lfm2` tool parser.

    <|tool_call_start|>[bash(command="ls"), read(path="a.txt")]<|tool_call_end|>

What the parser makes of odd output decides what the agent sees, so its behaviour is kept, surprises included:
positional arguments are dropped, only the first block counts, and anything that is not a list of calls with
literal arguments is returned as plain text with its sentinels.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from dataclasses import dataclass
from typing import Any

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
RESERVED_MARK = "_reserved_word_"
JSON_NAMES = {"true": True, "false": False, "null": None}
RESERVED_ARGUMENT = re.compile(rf"([(,]\s*)({'|'.join(keyword.kwlist)})(\s*=(?!=))")
PADDED_INTEGER = re.compile(r"(?<![\w.])0[0-9_]*[1-9][0-9_]*(?![0-9_.eEjJ])")
CONTROL = re.compile(r"\\.|[\n\r\t\0]", re.DOTALL)  # what a backslash already escapes is matched with it and kept
ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\x00"}


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object as text, as the OpenAI API carries it."""

    name: str
    arguments: str


def parse(output: str) -> tuple[str | None, list[ToolCall]]:
    """Model output → (content, calls). Without a readable call the content is the whole output."""
    start = output.find(START)
    if start < 0:
        return output, []
    end = output.find(END, start)
    inside = output[start + len(START) : end if end >= 0 else None].strip()
    after = output[end + len(END) :].rpartition(END)[2] if end >= 0 else ""  # an echoed block is dropped
    try:
        calls = _calls(inside)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return output, []
    around = [part for part in (output[:start].strip(), after.strip()) if part]
    return "\n".join(around) or None, calls


def _calls(text: str) -> list[ToolCall]:
    """Raises ValueError or SyntaxError when `text` is no list of calls with literal arguments."""
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError("not a list")
    value = getattr(_parse_python(text).body[0], "value", None)
    if not isinstance(value, ast.List) or not value.elts:
        raise ValueError("not a list of calls")
    return [_call(element) for element in value.elts]


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    arguments = {}
    for argument in node.keywords:
        name = argument.arg
        if name and name.endswith(RESERVED_MARK) and keyword.iskeyword(name.removesuffix(RESERVED_MARK)):
            name = name.removesuffix(RESERVED_MARK)
        arguments[name] = _literal(argument.value)
    return ToolCall(_dotted(node.func), json.dumps(arguments, ensure_ascii=False))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a function name")


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | str() | bool() | int() | float() as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {key.value: _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.JoinedStr(values=parts) if all(isinstance(part, ast.Constant) for part in parts):
            return "".join(str(part.value) for part in parts)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _literal(operand)
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
    raise ValueError("not a literal")


def _parse_python(text: str) -> ast.Module:
    """Parses `text`, or the first repair of it that is Python; each repair leaves valid text as it is."""
    candidates = [text]
    candidates.append(_escape_controls(_outside_strings(text, _strip_zeros)))
    requoted = _close_nested_quotes(candidates[-1])
    if requoted is not None:
        candidates.append(_escape_controls(requoted))
    candidates.append(_outside_strings(candidates[-1], _mark_reserved))
    for candidate in candidates:
        module = _try_parse(candidate)
        if module is not None:
            return module
    raise SyntaxError("no repair makes this Python")


def _try_parse(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" in a shell command is no concern of ours
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def _pieces(text: str) -> list[tuple[bool, str]]:
    """Splits into (is a string literal, text); a literal keeps its quotes, an unclosed one runs to the end."""
    pieces, begin, index, quote = [], 0, 0, ""
    while index < len(text):
        char = text[index]
        if quote and char == "\\":
            index += 2
            continue
        if quote and char == quote:
            pieces.append((True, text[begin : index + 1]))
            begin, quote = index + 1, ""
        elif not quote and char in "'\"":
            pieces.append((False, text[begin:index]))
            begin, quote = index, char
        index += 1
    return [*pieces, (bool(quote), text[begin:])]


def _outside_strings(text: str, rewrite) -> str:
    return "".join(piece if is_string else rewrite(piece) for is_string, piece in _pieces(text))


def _strip_zeros(code: str) -> str:
    return PADDED_INTEGER.sub(lambda match: str(int(match[0].replace("_", ""))), code)


def _mark_reserved(code: str) -> str:
    return RESERVED_ARGUMENT.sub(rf"\g<1>\g<2>{RESERVED_MARK}\g<3>", code)


def _escape_controls(text: str) -> str:
    """Raw line breaks and tabs inside strings become escapes: a heredoc in a shell command is no Python string."""
    def escape(match: re.Match) -> str:
        return ESCAPES.get(match[0], match[0])

    return "".join(CONTROL.sub(escape, piece) if is_string else piece for is_string, piece in _pieces(text))


def _close_nested_quotes(text: str) -> str | None:
    """Repairs command='sed -n '1,9p' a.txt': the one closing quote that makes the text Python, or None.

    A string is broken when its first closing quote is not followed by , ) ] } or :. Every later quote of the same
    kind that is followed by one of them is tried; two that both parse are ambiguous, and nothing is guessed.
    """
    index = 0
    while index < len(text):
        quote = text[index]
        if quote not in "'\"":
            index += 1
            continue
        closing = [at for at in _unescaped(text, quote, index + 1) if re.match(r"\s*[,)\]}:]", text[at + 1 :])]
        first = next(iter(_unescaped(text, quote, index + 1)), None)
        if first is None:
            return None
        if closing and closing[0] == first:
            index = first + 1
            continue
        repaired = []
        for close in closing:
            inside = text[index + 1 : close]
            for at in reversed(_unescaped(inside, quote, 0)):
                inside = f"{inside[:at]}\\{inside[at:]}"
            candidate = f"{text[:index]}{quote}{inside}{text[close:]}"
            if _try_parse(_escape_controls(candidate)) is not None:
                repaired.append(candidate)
        return repaired[0] if len(repaired) == 1 else None
    return None


def _unescaped(text: str, quote: str, start: int) -> list[int]:
    """Positions at or after `start` of `quote` characters that no backslash escapes."""
    found = re.compile(r"\\.|['\"]", re.DOTALL).finditer(text, start)
    return [match.start() for match in found if match[0] == quote]
