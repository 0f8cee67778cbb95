"""What the tiny model is shown: OpenCode's prompt, and transcripts of an agent that errs in a few plausible ways.

The mistakes are mostly shared by all kinds of questions (the answer goes to a wrong file or to the terminal, the header
is read as data), so reinforcement learning on some tasks carries over to others.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from recipe.local_tasks import ANSWER_FILE, INPUT_DIR, LocalTask

Message = dict[str, Any]
PROMPT_FILE = Path(__file__).parent / "opencode_prompt.json"
TRAINING_HIDES = ("task", "webfetch")  # tools that OpenEnv switches off in rollouts for training

# Shares of each behaviour; the right one of every row together make about 0.37.
P_NO_CALL = 0.04  # stops without doing anything
P_LOOK = 0.12  # prints the top of the file first: right, but one call more
P_HEADER = 0.15  # takes the header for data
TARGETS = {f" > {ANSWER_FILE}": 0.44, " > /workdir/result.txt": 0.26, " > /workdir/output.txt": 0.12, "": 0.18}
FINAL = "Done."


@lru_cache
def opencode_prompt() -> dict[str, Any]:
    """{"system": text, "tools": list}: what OpenCode 1.18.33 sends (MIT licence), captured from its request."""
    return json.loads(PROMPT_FILE.read_text(encoding="utf-8"))


def request(instruction: str, *, training: bool = True, system: str | None = None) -> tuple[list[Message], list[Any]]:
    """(messages, tools) of the agent's first model call for a task."""
    prompt = opencode_prompt()
    tools = [t for t in prompt["tools"] if not (training and t["function"]["name"] in TRAINING_HIDES)]
    # `opencode run` puts a message with spaces between double quotes.
    messages = [{"role": "system", "content": system or prompt["system"]},
                {"role": "user", "content": f'"{instruction.strip()}"'}]
    return messages, tools


def varied_system(rng: random.Random) -> str:
    """The system prompt of another day, with another model name."""
    day, date = rng.choice(["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]), rng.randint(1, 28)
    month = rng.choice(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"])
    model = rng.choice(("model", "model", "tiny", "adapter", "policy", "opencode-lora", "LFM2.5-2.6B"))
    text = opencode_prompt()["system"]
    text = text.replace("Sun Nov 29 2026", f"{day} {month} {date:02d} {rng.randint(2026, 2029)}")
    text = text.replace("the model named model.", f"the model named {model}.")
    return text.replace("intercepted/model", f"intercepted/{model}")


def bash_call(command: str) -> Message:
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def behaviour(task: LocalTask, rng: random.Random) -> list[Message]:
    """The agent's side of one transcript, tool results included."""
    final = {"role": "assistant", "content": FINAL}
    if rng.random() < P_NO_CALL:
        return [final]
    messages: list[Message] = []
    file = f"{INPUT_DIR}/{task.file_name}"
    if rng.random() < P_LOOK:
        top = "".join(",".join(row) + "\n" for row in (task.header, *task.rows[:2]))
        messages += [bash_call(f"head -n 3 {file}"), {"role": "tool", "content": top}]
    command = task.pipeline
    if rng.random() < P_HEADER:
        command = command.replace("tail -n +2 ", "tail -n +1 ").replace("head -n 2 ", "head -n 1 ")
    target = rng.choices(list(TARGETS), list(TARGETS.values()))[0]
    shown = "(no output)" if target else task.answer + "\n"
    if rng.random() < 0.05:  # a slip of the sampler must not derail the rest of the episode
        shown = rng.choice((f"cut: {file}: No such file or directory\n", f"{rng.randint(0, 999)}\n", "(no output)"))
    return [*messages, bash_call(command + target), {"role": "tool", "content": shown}, final]
