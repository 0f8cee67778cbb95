"""A finished trial as a conversation: what the agent was asked, what the model wrote, called and got back.

A trial's folder (RUN_DIR/trials/<trial>) holds agent/opencode.txt, the agent's stream of events as they happened;
agent/trajectory.json, which Harbor makes of it and which lacks a turn that did not end; verifier/, and result.json. Any
of them may be missing or cut off: what is there is shown, and `notes` say what is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipe import json_lines

LONGEST = 20_000  # characters of one text that are kept, from its two ends
BIGGEST = 50_000_000  # bytes of a file that is read
Turn = dict[str, Any]  # {"role": user | model | error, "text"} or {"role": "tool", "tool", "arguments", "result"}


def read_trial(folder: Path) -> dict[str, Any]:
    """{"turns": [Turn], "verifier": text, "exception": text, "notes": [text], "secrets": [the trial's session keys]}.

    Raises nothing for damaged or missing files.
    """
    if not folder.is_dir():
        return {"turns": [], "verifier": "", "exception": "", "secrets": [],
                "notes": ["the folder of this trial is not here"]}
    notes: list[str] = []
    trajectory = _read_json(folder / "agent" / "trajectory.json", notes)
    turns = [turn for event in _events(folder / "agent" / "opencode.txt", notes) for turn in _of_event(event)]
    if not turns:
        turns = _of_trajectory(trajectory)
    if not any(turn["role"] == "user" for turn in turns):
        turns = [turn for turn in _of_trajectory(trajectory) if turn["role"] == "user"] + turns
    if not turns:
        notes.append("the agent left no conversation")
    result = _read_json(folder / "result.json", notes)
    error = _dict(result.get("exception_info"))
    exception = ": ".join(filter(None, (_text(error.get("exception_type")), _text(error.get("exception_message")))))
    return {"turns": turns, "verifier": _verifier(folder / "verifier"), "exception": exception, "notes": notes,
            "secrets": session_keys(_read_json(folder / "config.json", []))}


def session_keys(config: Any) -> list[str]:
    """Values of every "apiKey" and "x-api-key" in a trial's config.json."""
    if isinstance(config, list):
        return [key for item in config for key in session_keys(item)]
    if not isinstance(config, dict):
        return []
    here = [value for name, value in config.items()
            if name.lower() in ("apikey", "api_key", "x-api-key") and isinstance(value, str)]
    return sorted({*here, *(key for item in config.values() for key in session_keys(item))})


def shorten(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def _events(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not file.is_file() or file.stat().st_size > BIGGEST:
        notes.append(f"{file.parent.name}/{file.name} is {'too large' if file.is_file() else 'missing'}")
        return []
    return json_lines.read(file)


def _of_event(event: dict[str, Any]) -> list[Turn]:
    part, kind = _dict(event.get("part")), event.get("type")
    if kind == "user":
        return [{"role": "user", "text": _text(part.get("text") or event.get("text"))}]
    if kind in ("text", "reasoning") and part.get("text"):
        return [{"role": "model", "text": _text(part["text"]), "reasoning": kind == "reasoning"}]
    if kind == "tool_use":
        state = _dict(part.get("state"))
        result = state.get("output") if state.get("error") is None else state["error"]
        return [{"role": "tool", "tool": _text(part.get("tool")), "arguments": _arguments(state.get("input")),
                 "result": "(it did not end)" if result is None else _text(result)}]
    if kind == "error":
        return [{"role": "error", "text": _text(event.get("error") or part or event)}]
    return []


def _of_trajectory(trajectory: dict[str, Any]) -> list[Turn]:
    turns: list[Turn] = []
    for step in map(_dict, _list(trajectory.get("steps"))):
        if step.get("reasoning_content"):
            turns.append({"role": "model", "text": _text(step["reasoning_content"]), "reasoning": True})
        if step.get("message"):
            turns.append({"role": "user" if step.get("source") == "user" else "model", "text": _text(step["message"])})
        results = {r.get("source_call_id"): r.get("content")
                   for r in map(_dict, _list(_dict(step.get("observation")).get("results")))}
        for call in map(_dict, _list(step.get("tool_calls"))):
            turns.append({"role": "tool", "tool": _text(call.get("function_name")),
                          "arguments": _arguments(call.get("arguments")),
                          "result": _text(results.get(call.get("tool_call_id"), "(no result)"))})
    return turns


def _verifier(folder: Path) -> str:
    """What the verifier printed and the reward it wrote."""
    parts = []
    for file in sorted(folder.glob("*")) if folder.is_dir() else []:
        if file.is_file() and file.stat().st_size <= BIGGEST:
            text = file.read_text(errors="replace").strip()
            parts += [f"{file.name}: {text}"] if text else []
    return "\n".join(parts)


def _read_json(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(errors="replace"))
        if isinstance(found, dict):
            return found
        notes.append(f"{file.name} is not what it should be")
    except OSError:
        notes.append(f"{file.name} is missing")
    except ValueError:
        notes.append(f"{file.name} is cut off")
    return {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value or "" if value is None or isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)


def _arguments(value: Any) -> str:
    """One line an argument, and scripts with their own line breaks, which JSON would hide."""
    if not isinstance(value, dict):
        return _text(value)
    return "\n".join(f"{name}: {_text(item)}" for name, item in value.items())
