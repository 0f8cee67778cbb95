"""What there is to report about a run: its steps, its evaluations, its rollouts; of a run folder or a Hub repository.

`of_folder` reads a RUN_DIR, `of_repo` a repository with its checkpoints and eval/. Both work on a run that is under way
and on one that a crash cut off. Every text of a rollout has gone through recipe/redact.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe import checkpoints, conversations, hub, json_lines, report, rollout_log
from recipe.conversations import shorten
from recipe.redact import Redactor, stored_token

METRICS, SUMMARY, CELLS, CONVERSATIONS = "metrics.jsonl", "summary.json", "cells.jsonl", "conversations.jsonl"
Rollout = dict[str, Any]  # section, task, trial, status, reward, reason, tool_calls, seconds, and read_trial's parts


class NothingToReport(ValueError):
    """The folder or repository holds no run; the message says what was looked for."""


@dataclass
class Run:
    """`steps` are the lines of metrics.jsonl, one a step; `summary` is the learning curve (eval_watch.summarize);
    `results` maps the names of results files to their content."""

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollouts: list[Rollout] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def of_folder(run: Path, last_steps: int) -> Run:
    """Raises NothingToReport when `run` is no run folder."""
    found = Run(run.resolve().name, steps=read_steps(run / METRICS))
    read_eval(run / "eval", found)
    cells = last_cells(run / "eval" / CELLS)
    if not (found.steps or found.results or cells):
        raise NothingToReport(f"{run} is no run folder: it has neither {METRICS} nor eval/{CELLS} nor results in eval/")
    wanted = [*of_training(run, found, last_steps), *of_cells(cells)]
    found.rollouts = with_conversations(wanted, run / "trials")
    return found


def of_repo(repo: str, revision: str | None, into: Path) -> Run:
    """Downloads what a report needs to `into`. Raises NothingToReport, and hub.HubError when the Hub can't be read."""
    from huggingface_hub import HfApi, snapshot_download

    def fetch() -> str:
        sha = HfApi().repo_info(repo, revision=revision).sha
        files = HfApi().list_repo_files(repo, revision=sha)
        steps = [place[0] for place in map(checkpoints.step_and_file, files) if place]
        wanted = ["eval/*.json", f"eval/*{CELLS}", f"report/*/{METRICS}", f"report/*/{CONVERSATIONS}"]
        wanted += [f"checkpoint-{max(steps)}/trainer_state.json"] if steps else []
        snapshot_download(repo, revision=sha, local_dir=into, allow_patterns=wanted)
        return sha

    sha = hub.repeat(fetch, repo, f"reading {repo}")
    sent = sorted((into / "report").glob("*"))  # one folder a run, whose name ends in its time
    found = Run(f"{repo}@{sha[:8]}", steps=read_steps(*(folder / METRICS for folder in sent)))
    states = sorted(into.glob("checkpoint-*/trainer_state.json"), key=lambda file: checkpoints.step_of(file.parent))
    logged = from_trainer_state(states[-1]) if states else []
    if logged and (not found.steps or logged[-1]["step"] > found.steps[-1]["step"]):
        found.steps = logged
    read_eval(into / "eval", found)
    cells = last_cells(*sorted((into / "eval").glob(f"*{CELLS}")))  # those of each evaluation have its name there
    if not (found.steps or found.results or cells):
        raise NothingToReport(f"{repo} holds no run: neither a checkpoint nor results in eval/")
    found.rollouts = [r for folder in reversed(sent) for r in json_lines.read(folder / CONVERSATIONS)]
    if not found.rollouts:
        found.notes.append("The conversations of this run are not in the repository: they lie in the run folder, and "
                           "`report.py RUN_DIR --push` sends them.")
        found.rollouts = with_conversations(of_cells(cells), None)
    return found


def read_steps(*files: Path) -> list[dict[str, Any]]:
    """One record a step, in order; the last one of a step that a resumed run made again."""
    by_step = {record["step"]: record for file in files for record in json_lines.read(file)
               if isinstance(record.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def from_trainer_state(file: Path) -> list[dict[str, Any]]:
    """The steps as a checkpoint's trainer_state.json has them, under the names of metrics.jsonl."""
    names = {"step": "step", "reward_mean": "reward", "reward_std": "reward_std", "tool_calls": "tools/call_frequency",
             "tokens": "batch/forwarded_tokens_per_step", "trained_tokens": "batch/trained_tokens_per_step"}
    names |= {key: f"health/{key}" for key in ("ratio_mean", "ratio_min", "ratio_max", "fresh_ratio_mean",
                                               "staleness_mean")}
    parts = ("rollout_wait_s", "fwd_bwd_s", "optimizer_s", "weight_sync_s")
    try:
        history = json.loads(file.read_text())["log_history"]
    except (OSError, ValueError, KeyError):
        return []
    return [{name: log.get(key) for name, key in names.items()} | {
        "seconds": sum(log.get(f"perf/{part}") or 0.0 for part in parts)} for log in history if "loss" in log]


def read_eval(folder: Path, found: Run) -> None:
    """Summary and results files; one that is cut off is noted and left out."""
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text())
            if file.name == SUMMARY:
                found.summary = content
            elif "adapter" in content and "agreement" in content:
                found.results[file.stem] = content
        except (ValueError, TypeError) as err:
            found.notes.append(f"eval/{file.name} can't be read: {err}")


def last_cells(*files: Path) -> list[dict[str, Any]]:
    """The last line of each task, model and sample."""
    cells = {(c.get("task"), c.get("model"), c.get("sample", 0)): c for file in files for c in json_lines.read(file)}
    return [cell for cell in cells.values() if cell.get("task") and cell.get("model") and cell.get("status")]


def of_cells(cells: Iterable[dict[str, Any]]) -> list[Rollout]:
    keep = ("task", "trial", "status", "reward", "reason", "tool_calls", "seconds", "difficulty", "sample")
    return [{"section": f"evaluation: {cell['model']}"} | {key: cell.get(key) for key in keep}
            for cell in sorted(cells, key=lambda c: (c["model"], c["task"], c.get("sample", 0)))]


def of_training(run: Path, found: Run, last_steps: int) -> list[Rollout]:
    """Rollouts of the last steps, newest first; then those since then that no step trained, ungraded ones above all."""
    log = rollout_log.read(run)
    if found.steps and not log:
        found.notes.append(f"There is no {rollout_log.FILE}: the trials can't be assigned to steps.")
        return []
    chosen: list[Rollout] = []
    since = float("inf")
    for step in reversed(found.steps[-last_steps:] if last_steps else []):
        groups = {row["group"] for row in step.get("group_rows", [])}
        rollouts = [r for group in groups for r in rollout_log.of_step(log, group, step.get("time") or 0)]
        chosen += [_training(f"step {step['step']}", r) for r in rollouts]
        since = min([since, *(r["time"] for r in rollouts)])
        log = [r for r in log if r not in rollouts]
    return chosen + [_training("not trained", r) for r in log if not found.steps or r["time"] >= since]


def _training(section: str, r: dict[str, Any]) -> Rollout:
    reward = r.get("reward")
    status = "ungraded" if reward is None else "correct" if reward > 0 else "wrong"
    return {"section": section, "task": r.get("task"), "trial": r.get("trial"), "status": status, "reward": reward,
            "reason": r.get("reason") or "", "tool_calls": r.get("tool_calls"), "seconds": r.get("seconds")}


def with_conversations(rollouts: list[Rollout], trials: Path | None) -> list[Rollout]:
    """The rollouts with what their trials' folders hold; every text redacted, then cut to a length that can be read."""
    parts = [conversations.read_trial(trials / r["trial"]) if trials and r.get("trial") else {} for r in rollouts]
    # A tool's output may show the key of another trial: all of them go out of every text.
    redactor = Redactor([*stored_token(), *(key for part in parts for key in part.pop("secrets", ()))])
    return [redactor.deep(rollout | part, shorten) for rollout, part in zip(rollouts, parts, strict=True)]


def curve_of(found: Run) -> dict[str, Any]:
    """The learning curve: the watcher's, or the full evaluations as its points."""
    if found.summary.get("checkpoints"):
        return found.summary
    last = found.steps[-1]["step"] if found.steps else 0
    points = {int(step[1]) if (step := checkpoints.NAME.match(name)) else last: result
              for name, result in found.results.items()}
    return {"checkpoints": [{"step": step, **points[step]} for step in sorted(points)],
            "base": points[max(points)]["base"] if points else None}


def step_table(steps: list[dict[str, Any]]) -> str:
    """Markdown table of steps that also reads well in a terminal."""
    def line(s: dict[str, Any]) -> list[str]:
        speed = s["tokens"] / s["seconds"] if s.get("tokens") and s.get("seconds") else None
        graded = f"{s['correct']}/{s['rollouts']}" if "correct" in s else "–"
        return [str(s["step"]), _figure(s.get("reward_mean"), 3), graded, _figure(s.get("ratio_mean"), 4),
                _figure(s.get("tool_calls"), 1), _figure(speed, 0), _figure(s.get("staleness_mean"), 1),
                _figure(s.get("seconds"), 1)]

    return "\n".join(report.markdown_table(
        ["step", "reward", "correct", "ratio", "tools", "tokens/s", "stale", "seconds"], [line(s) for s in steps]))


def training_text(steps: list[dict[str, Any]], window: int = 20) -> str:
    """The training in a few lines: length, reward at its two ends, ratio of fresh rows, groups left out, alarms."""
    rewards = [s["reward_mean"] for s in steps if s.get("reward_mean") is not None]
    fresh = [s["fresh_ratio_mean"] for s in steps if s.get("fresh_ratio_mean") is not None]
    window = min(window, max(1, len(rewards) // 2))
    seconds = sum(s.get("seconds") or 0 for s in steps)
    end = f" of {steps[-1]['max_steps']}" if steps[-1].get("max_steps") else ""
    lines = [f"{len(steps)} steps up to step {steps[-1]['step']}{end}, {seconds / 60:.1f} minutes"]
    if rewards:
        lines.append(f"mean reward {sum(rewards[:window]) / window:.3f} in the first {window} steps, "
                     f"{sum(rewards[-window:]) / window:.3f} in the last {window}")
    if fresh:
        lines.append(f"importance ratio of rows sampled under the trained weights: {min(fresh):.5f} to "
                     f"{max(fresh):.5f} in {len(fresh)} steps")
    if skipped := {reason: n for reason, n in (steps[-1].get("skipped_groups") or {}).items() if n}:
        lines.append("groups left out: " + ", ".join(f"{n} {reason}" for reason, n in skipped.items()))
    if alarms := sorted({note.split(":")[0] for s in steps for note in s.get("notes") or [] if "ALARM" in note}):
        lines.append("alarms: " + ", ".join(alarms))
    return "\n".join(lines)


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
