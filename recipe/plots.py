"""The curves of a run as PNG files: training from metrics.jsonl, evaluation from eval/summary.json.

Drawn with matplotlib's Figure on Agg alone, without pyplot: no display, no global state, safe in any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipe.health import RATIO_BAND

BASE, ADAPTER = "#767676", "#0b62a4"
DPI = 150
SMOOTH = 20  # steps of the moving mean


def learning_curve(summary: Mapping[str, Any], png: Path) -> None:
    """Held-out pass@1 of every checkpoint with its 95% interval and the base as a band; below, tool calls a task.

    `summary` is what eval_watch.summarize makes: {"checkpoints": [{"step", "adapter", …}], "base"}, where base and
    adapter are `report.rate` dictionaries. A checkpoint without a graded cell has no point.
    """
    save(learning_figure(summary), png)


def training_curves(records: Sequence[Mapping[str, Any]], png: Path) -> None:
    """Reward, importance ratio, tool calls and tokens a second of each step, from the lines of metrics.jsonl."""
    save(training_figure(records), png)


def learning_figure(summary: Mapping[str, Any]) -> Figure:
    """The figure of `learning_curve`."""
    points = sorted(summary["checkpoints"], key=lambda point: point["step"])
    base = summary.get("base")
    figure = Figure(figsize=(7, 5), layout="constrained")
    score, calls = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    if base and base["pass_at_1"] is not None:
        score.axhspan(*base["ci95"], color=BASE, alpha=0.15, lw=0)
        score.axhline(base["pass_at_1"], color=BASE, ls="--", label="base, 95% interval")
    graded = [(p["step"], p["adapter"]) for p in points if p["adapter"]["pass_at_1"] is not None]
    values = [rate["pass_at_1"] for _, rate in graded]
    # matplotlib refuses a negative length, which rounding could make at 0 and 1
    spread = [[max(0.0, value - rate["ci95"][0]) for value, (_, rate) in zip(values, graded, strict=True)],
              [max(0.0, rate["ci95"][1] - value) for value, (_, rate) in zip(values, graded, strict=True)]]
    if graded:
        score.errorbar([step for step, _ in graded], values, yerr=spread, color=ADAPTER, marker="o", capsize=3,
                       label="checkpoint, 95% interval")
    score.set(ylabel="pass@1", ylim=(0, 1), title=_title(points))
    if base and base["mean_tool_calls"] is not None:
        calls.axhline(base["mean_tool_calls"], color=BASE, ls="--", label="base")
    costs = [(p["step"], p["adapter"]["mean_tool_calls"]) for p in points
             if p["adapter"]["mean_tool_calls"] is not None]
    if costs:
        calls.plot(*zip(*costs, strict=True), color=ADAPTER, marker="o", label="checkpoint")
    calls.set(ylabel="tool calls a task", xlabel="optimizer step")
    calls.set_ylim(0, 1.3 * max([value for _, value in costs] + [base["mean_tool_calls"] or 0 if base else 0, 0.5]))
    calls.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for panel in (score, calls):
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="best", fontsize="small")
    return figure


def _title(points: Sequence[Mapping[str, Any]]) -> str:
    tasks = sorted({point["tasks"] for point in points if "tasks" in point})
    return f"{'–'.join(map(str, tasks))} held-out tasks" if tasks else "no checkpoint evaluated yet"


def training_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure of `training_curves`."""
    steps = [record["step"] for record in records]
    figure = Figure(figsize=(10, 7), layout="constrained")
    (reward, ratio), (calls, speed) = figure.subplots(2, 2, sharex=True)
    _curve(reward, steps, [r.get("reward_mean") for r in records], "mean reward of the group")
    _curve(calls, steps, [r.get("tool_calls") for r in records], "tool calls a rollout")
    _curve(speed, steps, [r["tokens"] / r["seconds"] if r.get("tokens") and r.get("seconds") else None
                          for r in records], "tokens a second")
    low, mid, high = ([_float(r.get(f"ratio_{name}")) for r in records] for name in ("min", "mean", "max"))
    ratio.axhspan(*RATIO_BAND, color=BASE, alpha=0.2, lw=0, label="band of fresh rows")
    ratio.fill_between(steps, low, high, color=ADAPTER, alpha=0.2, lw=0, label="smallest to largest token")
    ratio.plot(steps, mid, color=ADAPTER, lw=1, label="mean")
    bottom, top = ratio.get_ylim()
    # One token of a stale row may be far off; the mean is what the panel is read for.
    ratio.set(title="importance ratio", ylim=(max(bottom, 0.5), min(top, 2.0)))
    ratio.legend(fontsize="small")
    for panel in (reward, ratio, calls, speed):
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for panel in (calls, speed):
        panel.set(xlabel="optimizer step")
    return figure


def _curve(panel: Any, steps: Sequence[int], values: Sequence[float | None], title: str) -> None:
    """Each step as a point, and the mean of the last SMOOTH of them as a line."""
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    means = [sum(value for _, value in part) / len(part)
             for part in (known[max(0, i + 1 - SMOOTH): i + 1] for i in range(len(known)))]
    panel.plot([step for step, _ in known], [value for _, value in known], ".", color=ADAPTER, alpha=0.4)
    panel.plot([step for step, _ in known], means, color=ADAPTER, label=f"mean of {SMOOTH} steps")
    panel.set(title=title)
    panel.legend(fontsize="small")


def _float(value: float | None) -> float:
    return float("nan") if value is None else value


def save(figure: Figure, png: Path) -> None:
    """Writes the figure; a reader, or an upload that runs now, never sees half a file."""
    png.parent.mkdir(parents=True, exist_ok=True)
    part = png.with_name(f".{png.name}.part")
    FigureCanvasAgg(figure).print_figure(part, format="png", dpi=DPI)
    part.replace(png)
