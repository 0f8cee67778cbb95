"""THINKING: the prompt's end, the history's prefix, and templates that are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_serve_policy import command, value
from trl.chat_template_utils import lfm2_2_5_v2_chat_template

from recipe import chat_template, lfm2
from recipe.chat_template import CLOSED, closed_thinking, kept_thinking
from recipe.config import Settings, SettingsError
from recipe.policy_cpu.chat import Text
from recipe.policy_cpu.lfm2_calls import END, START

LOCAL = Settings.load({"PRESET": "local"})
OPEN = lfm2_2_5_v2_chat_template.replace('"<|im_start|>assistant\\n"', '"<|im_start|>assistant\\n<think>"')


def tokenizer(thinking: str):
    return lfm2.load_tokenizer(dataclasses.replace(LOCAL, thinking=thinking))


@pytest.mark.parametrize(("thinking", "end"), [("as-template", "<|im_start|>assistant\n"),
                                               ("closed", "<|im_start|>assistant\n" + CLOSED)])
def test_each_turn_begins_with_the_tokens_of_the_turns_before(thinking, end):
    text = Text(tokenizer(thinking))
    messages = [{"role": "user", "content": "Do it."}]
    held: list[int] = []
    for turn in range(4):
        prompt = text.render(messages)
        assert prompt[:len(held)] == held, f"turn {turn}"
        assert text.decode(prompt, False).endswith(end)
        sampled = f"{START}[bash(command='ls {turn}')]{END}"
        held = [*prompt, *text.encode(sampled, False), text.tokenizer.eos_token_id]
        calls = [{"id": "a", "type": "function",
                  "function": {"name": "bash", "arguments": f'{{"command": "ls {turn}"}}'}}]
        messages += [{"role": "assistant", "content": None, "tool_calls": calls},
                     {"role": "tool", "tool_call_id": "a", "content": "x\n"}]


def turn(messages: list[dict], text: Text, sampled: str) -> list[int]:
    """Adds the assistant turn `sampled` as the server returns it; the tokens of its prompt and itself."""
    held = [*text.render(messages), *text.encode(sampled, False), text.tokenizer.eos_token_id]
    messages.append({"role": "assistant", "content": sampled})
    return held


@pytest.mark.parametrize("stock", [OPEN, OPEN.replace("<think>\"", "<think>\\n\""), lfm2_2_5_v2_chat_template])
def test_reasoning_stays_in_the_history(stock):
    """Also before the last user message, whose reasoning the stock template drops, and where the prompt opens it."""
    text = Text(tokenizer("as-template"))
    for template, kept in ((kept_thinking(stock), True), (stock, False)):
        text.tokenizer.chat_template = template
        messages = [{"role": "user", "content": "Do it."}]
        for sampled in ("I look.</think>One.", "Cut off in the middle", "<think>Again.</think>Two."):
            held = turn(messages, text, sampled)
            messages.append({"role": "user", "content": "Go on."})
            if kept:
                assert text.render(messages)[:len(held)] == held, sampled
        assert (text.render(messages)[:len(held)] == held) is kept


def test_reasoning_in_a_field_of_its_own_is_opened_once():
    text = Text(tokenizer("as-template"))
    text.tokenizer.chat_template = kept_thinking(OPEN)
    prompt = text.render([{"role": "user", "content": "Do it."},
                          {"role": "assistant", "content": "x", "reasoning": "y"}])
    assert text.decode(prompt, False).count("<think>y</think>x") == 1
    assert text.decode(prompt, False).count("<think>") == 2  # and the one that opens the next turn


def test_a_template_of_another_family_stays_as_it_is():
    assert kept_thinking("{{ messages }}") == "{{ messages }}"


def test_an_open_block_is_closed():
    assert "assistant\\n<think>" in OPEN
    assert closed_thinking(OPEN) == closed_thinking(lfm2_2_5_v2_chat_template)


@pytest.mark.parametrize("template", ["", "{{ messages }}", lfm2_2_5_v2_chat_template * 2])
def test_another_template_is_refused(template):
    with pytest.raises(SettingsError, match="THINKING=as-template"):
        closed_thinking(template)


def test_the_server_gets_the_trainers_template(tmp_path, monkeypatch):
    monkeypatch.setenv("PRESET", "local")
    for engine in ("cpu", "vllm"):
        path = value(command("train", ENGINE=engine, PRESET="local", CACHE_DIR=str(tmp_path)), "--chat-template")
        assert Path(path).parent == tmp_path
    path = value(command("train", PRESET="local", CACHE_DIR="/nowhere", RUN_DIR=str(tmp_path / "run")),
                 "--chat-template")
    assert path == str(tmp_path / "run/chat-template.jinja"), "it goes with the run"
    for thinking in ("as-template", "closed"):
        monkeypatch.setenv("THINKING", thinking)
        assert chat_template.main([path]) == 0
        assert Path(path).read_text() == tokenizer(thinking).chat_template
    assert "<think></think>" in Path(path).read_text()
