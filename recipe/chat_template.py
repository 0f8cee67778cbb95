"""Thinking as a setting, and prompts that begin with the tokens of the turns before: the chat template in use.

    python3 -m recipe.chat_template FILE     writes the template of MODEL under THINKING, for the policy server

LFM2.5's templates have no switch for thinking. `closed` writes an empty block into the prompt of each turn, so that the
model answers at once, and into the history. `as-template` leaves thinking as it ships, and keeps it in the history:
the stock templates drop the reasoning of turns before the last user message, and one that opens a block in the prompt
does not open it in the history, so that each further turn would fork into a training row of its own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser

CLOSED = "<think></think>"
# The generation prompt, which some releases end with an open block, and the place where an assistant turn is rendered.
PROMPT = re.compile(r'"<\|im_start\|>assistant\\n((?:<think>(?:\\n)?)?)"')
TURN = """{{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}"""
DROPS = "preserve_thinking | default(false)"
UNLESS_GIVEN = "not (message.thinking or message.reasoning or message.reasoning_content)"


def closed_thinking(template: str) -> str:
    """`template` with CLOSED after the header of every assistant turn, the one to be written included.

    Raises SettingsError for a template that is not of LFM2.5's shape.
    """
    for what, found in (("generation prompt", len(PROMPT.findall(template))), ("assistant turn", template.count(TURN))):
        if found != 1:
            raise SettingsError(f"THINKING=closed: the chat template of the model has {found} places that look like "
                                f"LFM2.5's {what}, expected 1. Use THINKING=as-template with this model.")
    template = PROMPT.sub(lambda _: f'"<|im_start|>assistant\\n{CLOSED}"', template)
    return open_turns(template, f'{{{{- "{CLOSED}" -}}}}')


def kept_thinking(template: str) -> str:
    """`template` with the reasoning of all earlier turns in the history, opened as the prompt opened it.

    A template of another shape is returned as it is.
    """
    template = template.replace(DROPS, DROPS.replace("false", "true"))
    opened = PROMPT.findall(template)
    if len(opened) == 1 and opened[0] and template.count(TURN) == 1:
        template = open_turns(template, f'{{%- if {UNLESS_GIVEN} -%}}{{{{- "{opened[0]}" -}}}}{{%- endif -%}}')
    return template


def open_turns(template: str, opening: str) -> str:
    """`template` with `opening` after the header of each assistant turn of the history, outside of what is trained."""
    header, role, generation = TURN.split("\n")
    return template.replace(TURN, "\n".join([header, role, f"        {opening}", generation]))


def template_in_use(template: str, thinking: str) -> str:
    """The template of trainer, server and evaluation for THINKING=`thinking`."""
    return closed_thinking(template) if thinking == "closed" else kept_thinking(template)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__, prog="python3 -m recipe.chat_template")
    parser.add_argument("file", type=Path)
    file = parser.parse_args(argv).file
    from transformers import AutoTokenizer

    settings = Settings.load()
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model, **settings.hub_revision)
        text = template_in_use(tokenizer.chat_template or "", settings.thinking)
    except SettingsError as err:
        print(err, file=sys.stderr)
        return EXIT_USAGE
    except OSError as err:
        print(f"the tokenizer of MODEL={settings.model} cannot be read: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
