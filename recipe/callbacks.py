"""What the trainer tells the outside: heartbeat, one line a step, metrics.jsonl, and a clean end on SIGTERM."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TrackioCallback
from trl.experimental.async_grpo.async_grpo_trainer import log_rollout_traces
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from recipe import json_lines, sandbox_costs, watchdog
from recipe.group_trainer import GroupGRPOTrainer
from recipe.health import RATIO_BAND, OversizeAlarm, RatioAlarm, RatioOutside, RowHealth, step_health, token_mean
from recipe.redact import Redactor, stored_token
from recipe.rewards import solved
from recipe.rollout_worker import RolloutWorker

TRACE_INTERVAL = 10  # steps between two groups whose conversations go to trackio
ETA_WINDOW = 20  # steps whose mean duration gives the time left


class StopRequested(Exception):
    """SIGTERM arrived between two steps; no gradient is half applied."""


class HeartbeatCallback(TrainerCallback):
    """Touches the heartbeat at every phase change and step; `on_skip` does so for groups that are not trained."""

    def __init__(self, path: Path, max_steps: int):
        self.path, self.max_steps, self.step = path, max_steps, 0

    def beat(self, phase: str, **info: Any) -> None:
        watchdog.beat(self.path, phase, step=self.step, max_steps=self.max_steps, **info)

    def on_skip(self, reason: str) -> None:
        print(f"group skipped: {reason}", flush=True)
        self.beat("train", skipped=reason)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step
        self.beat("train-setup")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step
        self.beat("train")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat("train", saved=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat("save")


class StopCallback(TrainerCallback):
    """SIGTERM: the step under way is finished, a checkpoint saved, and training ends.

    While the trainer waits for rollouts there is no step to finish; whoever waits looks at `requested`. The signal also
    ends the child of `worker`, which then must not end the trainer while it saves.
    """

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker, self.requested = worker, False
        self.previous: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.previous = signal.signal(signal.SIGTERM, self._request)

    def uninstall(self) -> None:
        """Gives SIGTERM its former meaning back."""
        if self.previous is not None:
            signal.signal(signal.SIGTERM, self.previous)

    def _request(self, signum: int, frame: Any) -> None:
        print("SIGTERM: what is under way is finished and saved, then the training ends.", flush=True)
        self.requested = self.worker.ending = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.requested:
            control.should_save = control.should_training_stop = True


class AtStep:
    """Trackio with the optimizer step as its x axis: by itself it counts calls of log(), of which there are others
    than steps, and goes on counting where a killed run was instead of where the resumed one is."""

    def __init__(self, trackio: Any):
        self.trackio = trackio

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trackio, name)

    def log(self, metrics: dict[str, Any]) -> None:
        self.trackio.log(metrics, step=metrics["train/global_step"])

    @classmethod
    def install(cls, callbacks: Iterable[TrainerCallback]) -> None:
        for callback in callbacks:
            if isinstance(callback, TrackioCallback):
                callback._trackio = cls(callback._trackio)


class MetricsCallback(TrainerCallback):
    """Prints one line a step and appends one JSON object a step to `path`; `summary()` tells the whole run.

    Alarms are printed and recorded; with `ratio_stop` that of the importance ratio raises RatioOutside.
    """

    def __init__(self, path: Path, token_budget: int = 0, ratio_stop: bool = False, recipe: str = "smoldataenvs"):
        self.path, self.ratio_stop, self.recipe = path, ratio_stop, recipe
        self.ratio_alarm, self.oversize = RatioAlarm(), OversizeAlarm(token_budget)
        self.clean = Redactor(stored_token())
        self.trainer: GroupGRPOTrainer | None = None  # set after the trainer is built
        self.began = self.last = time.monotonic()
        self.durations: list[float] = []
        self.fresh: list[RowHealth] = []
        self.rows = self.steps = self.no_contrast = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = self.last = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs or self.trainer is None:
            return  # the closing log of the whole run
        now = time.monotonic()
        self.durations.append(now - self.last)
        self.last = now
        record = self.record(state.global_step, state.max_steps, logs)
        alarm = self.ratio_alarm.feed(record["fresh_ratio_mean"])
        notes = self.oversize.feed(self.trainer.group_health) + ([alarm] if alarm else [])
        record |= {"oversize_rows": self.oversize.oversize, "notes": notes}
        json_lines.append(self.path, record)
        print(line(record), *notes, sep="\n", flush=True)
        if alarm and self.ratio_stop:
            raise RatioOutside(alarm)
        if state.global_step % TRACE_INTERVAL == 1:
            group = self.without_secrets(self.trainer._rollout_dataset.last_group)
            log_rollout_traces(group, state.global_step, args.report_to, max_traces=args.num_generations)

    def without_secrets(self, samples: Iterable[RolloutSample]) -> list[RolloutSample]:
        """The samples with conversations that somebody else may read: Trackio may be a Space."""
        return [replace(sample, prompt=self.clean.deep(sample.prompt), completion=self.clean.deep(sample.completion))
                for sample in samples]

    def record(self, step: int, max_steps: int, logs: dict[str, Any]) -> dict[str, Any]:
        rows = self.trainer.group_health
        health = step_health(rows)
        rollouts = {row.rollout: row for row in rows}.values()
        rewards = [row.reward for row in rollouts] + rows[0].rowless
        recent = self.durations[-ETA_WINDOW:]
        self.steps += 1
        self.rows += len(rows)
        self.fresh += [row for row in rows if row.fresh]
        self.no_contrast += not health["contrast"]
        return _finite({
            "step": step, "max_steps": max_steps, "time": time.time(), "seconds": self.durations[-1],
            "eta_seconds": (max_steps - step) * sum(recent) / len(recent),
            "reward_mean": sum(rewards) / len(rewards), "reward_std": _std(rewards), "rewards": rewards,
            "correct": sum(solved(reward, self.recipe) for reward in rewards),
            "rollouts": len(rewards), "rows": len(rows),
            "tool_calls": sum(row.tool_calls for row in rollouts) / len(rewards),
            "tokens": sum(row.tokens for row in rows), "trained_tokens": sum(row.trained for row in rows),
            **health, "skipped_groups": dict(self.trainer._rollout_dataset.skipped),
            "sandboxes": sandbox_costs.read(self.path.parent),
            "group_rows": [asdict(row) for row in rows],
            "trl": {key: value for key, value in logs.items() if isinstance(value, (int, float))},
        })

    def summary(self) -> dict[str, Any]:
        """What the run's steps amount to; fresh_rows_outside counts rows whose mean ratio left RATIO_BAND."""
        ratios = [row.ratio for row in self.fresh]
        return _finite({
            "steps": self.steps, "seconds": time.monotonic() - self.began, "rows": self.rows,
            "groups_without_contrast": self.no_contrast, "oversize_rows": self.oversize.oversize,
            "skipped_groups": dict(self.trainer._rollout_dataset.skipped) if self.trainer._rollout_dataset else {},
            "fresh_rows": len(ratios), "fresh_ratio_mean": token_mean(self.fresh) if ratios else None,
            "fresh_ratio_min": min(ratios, default=None), "fresh_ratio_max": max(ratios, default=None),
            "fresh_rows_outside": sum(not RATIO_BAND[0] <= ratio <= RATIO_BAND[1] for ratio in ratios),
        })


def line(r: dict[str, Any]) -> str:
    """The console line of one step."""
    trl = {key: value if value is not None else math.nan for key, value in r["trl"].items()}
    wait, train, sync = (trl.get(f"perf/{n}", math.nan) for n in ("rollout_wait_s", "fwd_bwd_s", "weight_sync_s"))
    fresh = f"{r['fresh_ratio_mean']:.5f}" if r["fresh_rows"] else "-"
    skipped = sum(r["skipped_groups"].values())
    return " | ".join([
        f"step {r['step']}/{r['max_steps']}",
        f"reward {r['reward_mean']:.3f} ± {r['reward_std']:.3f} ({r['correct']}/{r['rollouts']} correct)",
        f"ratio {r['ratio_mean']:.4f} [{r['ratio_min']:.3f}, {r['ratio_max']:.3f}] fresh {r['fresh_rows']}/{r['rows']} "
        f"rows {fresh}",
        f"entropy {trl.get('entropy', math.nan):.3f}",
        f"tools {r['tool_calls']:.1f}",
        f"tokens {r['tokens']} ({r['trained_tokens']} trained, {r['tokens'] / r['seconds']:.0f}/s)",
        f"stale {r['staleness_mean']:.1f}",
        *([f"forks {r['forks']}"] if r["forks"] else []),
        *([f"skipped {skipped}"] if skipped else []),
        f"{r['seconds']:.1f} s (wait {wait:.1f}, train {train:.1f}, sync {sync:.1f})",
        f"ETA {_clock(r['eta_seconds'])}",
    ])


def summary_text(s: dict[str, Any]) -> str:
    skipped = ", ".join(f"{count} {reason}" for reason, count in s["skipped_groups"].items()) or "none"
    text = (f"{s['steps']} steps in {_clock(s['seconds'])}; groups without contrast: {s['groups_without_contrast']}; "
            f"skipped groups: {skipped}.\n")
    if not s["fresh_rows"]:
        return text + (f"None of {s['rows']} rows was sampled wholly under the weights that were trained; the "
                       "importance ratio could not be checked. Lower MAX_INFLIGHT to get some.")
    return text + (f"Rows sampled wholly under the trained weights: {s['fresh_rows']} of {s['rows']}; importance ratio "
                   f"mean {s['fresh_ratio_mean']:.6f}, rows from {s['fresh_ratio_min']:.6f} to "
                   f"{s['fresh_ratio_max']:.6f}, {s['fresh_rows_outside']} outside {RATIO_BAND[0]}–{RATIO_BAND[1]}.")


def _std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def _clock(seconds: float) -> str:
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{secs:02d}s"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
