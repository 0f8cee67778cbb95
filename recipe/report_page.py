"""One static HTML page of a run: tables, curves, and every rollout to read as a conversation.

The page needs nothing but itself: images are inside it, it has no script, and its Content-Security-Policy lets a
browser run and fetch nothing, whatever a model or a tool wrote. All text is escaped; control characters become visible.
"""

from __future__ import annotations

import base64
import html
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STATUSES = ("correct", "wrong", "ungraded")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours of terminal programs

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 1rem auto; padding: 0 1rem; color: #1b1b1b }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; margin: .2rem 0; font-size: 13px }}
pre.table {{ white-space: pre; overflow-x: auto }}
img {{ max-width: 100% }}
details.rollout {{ border-left: .3rem solid #999; margin: .25rem 0; padding: .1rem .6rem; background: #f6f6f6 }}
details.correct {{ border-color: #2a7d2e }} details.wrong {{ border-color: #b3261e }}
details.ungraded {{ border-color: #b07800 }}
summary {{ cursor: pointer }} summary b {{ display: inline-block; min-width: 5.5rem }}
.turn {{ margin: .5rem 0; padding: .3rem .6rem; background: #fff; border-radius: .3rem }}
.turn h4, .note {{ margin: 0; font-size: 12px; color: #666; font-weight: 600 }}
.user {{ background: #e8f0fb }} .tool pre + h4 {{ margin-top: .3rem }} .error {{ background: #fdecea }}
.reasoning pre {{ color: #777; font-style: italic }}
body:has(#only-correct:checked) details:is(.wrong, .ungraded),
body:has(#only-wrong:checked) details:is(.correct, .ungraded),
body:has(#only-ungraded:checked) details:is(.correct, .wrong) {{ display: none }}
</style></head><body>
"""


def text(value: Any) -> str:
    """Escaped text of an element or attribute; what could hide or reorder other text is replaced by U+FFFD."""
    return html.escape(CONTROL.sub("\ufffd", ANSI.sub("", str(value))))


def render(title: str, parts: Iterable[tuple[str, str]], images: Iterable[Path], notes: Iterable[str],
           rollouts: list[Mapping[str, Any]]) -> str:
    """The page: `parts` are (heading, preformatted text), `rollouts` come in the order of their sections."""
    out = [HEAD.format(title=text(title)), f"<h1>{text(title)}</h1>"]
    out += [f'<p class="note">{text(note)}</p>' for note in notes]
    for heading, body in parts:
        out.append(f'<h2>{text(heading)}</h2><pre class="table">{text(body)}</pre>')
    for image in images:
        data = base64.b64encode(image.read_bytes()).decode()
        out.append(f'<p><img alt="{text(image.stem)} curves" src="data:image/png;base64,{data}"></p>')
    out.append("<h2>Rollouts</h2>" + _filter(rollouts))
    for number, (section, members) in enumerate(itertools.groupby(rollouts, key=lambda r: r.get("section"))):
        members = list(members)
        out.append(f'<h3 id="section-{number}">{text(section)}: {_counts(members)}</h3>')
        out += map(_rollout, members)
    return "\n".join([*out, "</body></html>\n"])


def _filter(rollouts: list[Mapping[str, Any]]) -> str:
    if not rollouts:
        return "<p>There are none to read.</p>"
    choices = "".join(f' <label><input type="radio" name="only" id="only-{status}"> {status}</label>'
                      for status in STATUSES)
    return f'<p>Show <label><input type="radio" name="only" checked> all</label>{choices}</p>'


def _counts(rollouts: list[Mapping[str, Any]]) -> str:
    counts = Counter(r.get("status") for r in rollouts)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def _rollout(r: Mapping[str, Any]) -> str:
    status = r.get("status") if r.get("status") in STATUSES else "ungraded"
    facts = [str(r.get("task") or "unknown task"), *([r["difficulty"]] if r.get("difficulty") else []),
             *([f"sample {r['sample'] + 1}"] if r.get("sample") else []),
             "no reward" if r.get("reward") is None else f"reward {r['reward']:.3f}",
             *([f"{r['tool_calls']} tool calls"] if r.get("tool_calls") is not None else []),
             *([f"{r['seconds']:.1f} s"] if r.get("seconds") else [])]
    out = [f'<details class="rollout {status}" id="{text(r.get("trial") or "")}"><summary><b>{status}</b> '
           f'{text(" · ".join(facts))}</summary>']
    if r.get("reason"):
        why = "Why it is ungraded: " if status == "ungraded" else ""
        out.append(f'<div class="turn error"><pre>{why}{text(r["reason"])}</pre></div>')
    out += [f'<p class="note">{text(note)}</p>' for note in r.get("notes") or []]
    out += map(_turn, r.get("turns") or [])
    for heading in ("exception", "verifier"):
        if r.get(heading):
            out.append(f'<div class="turn {heading}"><h4>{heading}</h4><pre>{text(r[heading])}</pre></div>')
    out.append(f'<p class="note">trial {text(r.get("trial") or "unknown")}</p></details>')
    return "\n".join(out)


def _turn(turn: Mapping[str, Any]) -> str:
    role = turn.get("role") if turn.get("role") in ("user", "model", "tool", "error") else "error"
    if role == "tool":
        return (f'<div class="turn tool"><h4>tool call: {text(turn.get("tool"))}</h4>'
                f'<pre>{text(turn.get("arguments"))}</pre><h4>result</h4><pre>{text(turn.get("result"))}</pre></div>')
    kind = "reasoning" if turn.get("reasoning") else role
    return f'<div class="turn {kind}"><h4>{kind}</h4><pre>{text(turn.get("text"))}</pre></div>'
