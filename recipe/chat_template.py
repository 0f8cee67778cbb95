"""Thinking as a setting: the chat template as it ships, or with every assistant turn opened by a closed think block.

    python3 -m recipe.chat_template FILE     writes the template of MODEL for THINKING=closed, for the policy server

LFM2.5's templates have no switch for thinking. `closed` writes an empty block into the prompt of each turn, so that the
model answers at once, and into the history, so that a turn's prompt begins with the tokens of the turns before.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_USAGE, Parser

CLOSED = "<think></think>"
# The generation prompt, which some releases end with an open block, and the place where an assistant turn is rendered.
PROMPT = re.compile(r'"<\|im_start\|>assistant\\n(?:<think>(?:\\n)?)?"')
TURN = """{{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}"""


def closed_thinking(template: str) -> str:
    """`template` with CLOSED after the header of every assistant turn, the one to be written included.

    Raises SettingsError for a template that is not of LFM2.5's shape.
    """
    for what, found in (("generation prompt", len(PROMPT.findall(template))), ("assistant turn", template.count(TURN))):
        if found != 1:
            raise SettingsError(f"THINKING=closed: the chat template of the model has {found} places that look like "
                                f"LFM2.5's {what}, expected 1. Use THINKING=as-template with this model.")
    template = PROMPT.sub(lambda _: f'"<|im_start|>assistant\\n{CLOSED}"', template)
    header, role, generation = TURN.split("\n")
    return template.replace(TURN, "\n".join([header, role, f'        {{{{- "{CLOSED}" -}}}}', generation]))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__, prog="python3 -m recipe.chat_template")
    parser.add_argument("file", type=Path)
    file = parser.parse_args(argv).file
    from transformers import AutoTokenizer

    settings = Settings.load()
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model, **settings.hub_revision)
        text = closed_thinking(tokenizer.chat_template or "")
    except SettingsError as err:
        print(err, file=sys.stderr)
        return EXIT_USAGE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
