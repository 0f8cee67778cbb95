"""THINKING: the prompt's end, the history's prefix, and templates that are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_serve_policy import command, value
from trl.chat_template_utils import lfm2_2_5_v2_chat_template

from recipe import chat_template, lfm2
from recipe.chat_template import CLOSED, closed_thinking
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


def test_an_open_block_is_closed():
    assert "assistant\\n<think>" in OPEN
    assert closed_thinking(OPEN) == closed_thinking(lfm2_2_5_v2_chat_template)


@pytest.mark.parametrize("template", ["", "{{ messages }}", lfm2_2_5_v2_chat_template * 2])
def test_another_template_is_refused(template):
    with pytest.raises(SettingsError, match="THINKING=as-template"):
        closed_thinking(template)


def test_the_server_gets_the_trainers_template(tmp_path, monkeypatch):
    for engine in ("cpu", "vllm"):
        path = value(command("train", ENGINE=engine, PRESET="local", THINKING="closed", CACHE_DIR=str(tmp_path)),
                     "--chat-template")
        assert Path(path).parent == tmp_path
        assert "--chat-template" not in command("train", ENGINE=engine, PRESET="local")
    monkeypatch.setenv("PRESET", "local")
    assert chat_template.main([path]) == 0
    assert Path(path).read_text() == tokenizer("closed").chat_template
