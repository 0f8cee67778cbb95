"""Numbers of a base-against-adapter comparison: intervals, agreement, exact McNemar test, and their table.

Works on evaluation cells as plain dictionaries (one line of eval/cells.jsonl each: `task`, `sample`, `model`,
`status` = correct | wrong | ungraded, `tool_calls`, `tokens`, and a group such as `difficulty`). A cell that did not
run is ungraded: it is counted and shown, and is in no rate. Standard library only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, variance
from typing import Any

Cell = Mapping[str, Any]
Key = tuple[str, int]  # task, sample
GRADED = ("correct", "wrong")
Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


def wilson(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a proportion; (0, 1) when nothing was observed.

    Unlike the normal approximation it stays inside [0, 1] and keeps its coverage at rates near 0 and 1. Both may be
    fractions: an effective number of trials, see `clustered_wilson`.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials: successes must lie between 0 and the trials")
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # Exact at the ends, where rounding would leave 1e-17 or a bound above 1.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def clustered_wilson(task_means: Sequence[float], trials: int) -> tuple[float, float]:
    """95% Wilson interval of the mean of `task_means`, each the mean of a task's samples; `trials` is their number.

    Samples of one task resemble each other, so they count as fewer trials than they are: as many as would give a plain
    proportion the standard error that the tasks' means show (effective sample size, Korn and Graubard 1998, Survey
    Methodology 24:193-201; with Wilson's interval: Franco et al. 2019, J. Survey Statistics and Methodology
    7:334-364). With one sample a task it is the plain Wilson interval.
    """
    n = len(task_means)
    if n == 0:
        return 0.0, 1.0
    p = fmean(task_means)
    spread = sum((mean - p) ** 2 for mean in task_means) / n
    if n == trials or p in (0, 1):
        effective = float(n)
    else:
        effective = min(trials, max(n, n * p * (1 - p) / spread)) if spread else trials
    return wilson(p * effective, effective)


def mcnemar_exact(only_base: int, only_adapter: int) -> float:
    """Two-sided exact McNemar p-value: the discordant pairs against a fair coin, in exact integers."""
    n, smaller = only_base + only_adapter, min(only_base, only_adapter)
    if smaller < 0:
        raise ValueError(f"counts must not be negative: {only_base}, {only_adapter}")
    tail = sum(math.comb(n, k) for k in range(smaller + 1))
    return min(1.0, 2 * tail / 2**n)


def rate(cells: Iterable[Cell]) -> dict[str, Any]:
    """Counts, pass@1 (mean over tasks of the mean over a task's graded samples; None where there are none), its 95%
    interval, and mean costs. With several samples a task also pass@1 of each sample and the variance between them."""
    cells = list(cells)
    graded = [c for c in cells if c["status"] in GRADED]
    correct = sum(c["status"] == "correct" for c in graded)
    means = list(_task_means(graded).values())
    result = {
        "cells": len(cells), "correct": correct, "wrong": len(graded) - correct, "ungraded": len(cells) - len(graded),
        "pass_at_1": _mean(means), "ci95": list(clustered_wilson(means, len(graded))),
        "mean_tool_calls": _mean(c["tool_calls"] for c in graded),
        "mean_tokens": _mean(c["tokens"] for c in graded),
    }
    numbers = sorted({_sample(c) for c in cells})
    if len(numbers) > 1:
        each = [_mean(c["status"] == "correct" for c in graded if _sample(c) == number) for number in numbers]
        known = [value for value in each if value is not None]
        result |= {"samples": each, "variance_between_samples": variance(known) if len(known) > 1 else None}
    return result


def agreement(base: Mapping[Key, Cell], adapter: Mapping[Key, Cell]) -> dict[str, Any]:
    """Which cells each of the two solves, over pairs (task and sample) graded with both; `excluded` counts the others.

    The p-value is that of the exact McNemar test. With several samples a task, whose pairs are not independent, it
    compares tasks instead: those with more correct samples of one model against those with more of the other.
    """
    keys = sorted(base.keys() | adapter.keys())
    pairs = {key: (base[key], adapter[key]) for key in keys if key in base and key in adapter
             and base[key]["status"] in GRADED and adapter[key]["status"] in GRADED}
    solved = {key: (b["status"] == "correct", a["status"] == "correct") for key, (b, a) in pairs.items()}
    both = [pairs[key] for key, s in solved.items() if s == (True, True)]
    counts = Counter(solved.values())
    tasks: dict[str, int] = {}
    for (task, _), (by_base, by_adapter) in solved.items():
        tasks[task] = tasks.get(task, 0) + by_adapter - by_base
    only_base, only_adapter = counts[True, False], counts[False, True]
    return {
        "tasks": len(tasks), "pairs": len(pairs), "excluded": len(keys) - len(pairs),
        "both": len(both), "only_base": only_base, "only_adapter": only_adapter, "neither": counts[False, False],
        "difference": (only_adapter - only_base) / len(pairs) if pairs else None,
        "mcnemar_p": mcnemar_exact(sum(d < 0 for d in tasks.values()), sum(d > 0 for d in tasks.values())),
        "tool_calls_where_both_solve": {"base": _mean(b["tool_calls"] for b, _ in both),
                                        "adapter": _mean(a["tool_calls"] for _, a in both)},
    }


def compare(base: Iterable[Cell], adapter: Iterable[Cell], group_by: Sequence[str] = ("difficulty", "kind")
            ) -> dict[str, Any]:
    """The whole comparison as one JSON-ready dictionary; at most one cell a task, sample and model."""
    base_of, adapter_of = _by_key(base), _by_key(adapter)
    groups: dict[str, Any] = {}
    for key in group_by:
        values = {c[key] for c in [*base_of.values(), *adapter_of.values()] if c.get(key)}
        if len(values) > 1:  # a single group would repeat the overall row
            groups[key] = {value: {"base": rate(c for c in base_of.values() if c.get(key) == value),
                                   "adapter": rate(c for c in adapter_of.values() if c.get(key) == value)}
                           for value in sorted(values)}
    return {"base": rate(base_of.values()), "adapter": rate(adapter_of.values()),
            "agreement": agreement(base_of, adapter_of), "by": groups}


def task_count(r: Mapping[str, Any]) -> int:
    """Tasks that a result of `rate` is about."""
    return r["cells"] // len(r.get("samples", [0]))


def render(result: Mapping[str, Any], adapter_name: str = "adapter") -> str:
    """A Markdown table of `compare`'s result that also reads well in a terminal."""
    rows = [("all tasks", result["base"], result["adapter"])]
    for values in result["by"].values():
        rows += [(f"· {value}", pair["base"], pair["adapter"]) for value, pair in values.items()]
    lines = markdown_table(
        ["", "tasks", "base pass@1", f"{adapter_name} pass@1", "base calls", "calls", "ungraded"],
        [[label, str(max(task_count(b), task_count(a))), percent(b), percent(a), number(b["mean_tool_calls"]),
          number(a["mean_tool_calls"]), f"{b['ungraded']} + {a['ungraded']}"] for label, b, a in rows])
    g = result["agreement"]
    calls = g["tool_calls_where_both_solve"]
    several = "samples" in result["base"]
    lines += [""] + markdown_table(
        ["both solve", "only base", f"only {adapter_name}", "neither", "difference",
         "exact McNemar p" + ", by task" * several],
        [[str(g["both"]), str(g["only_base"]), str(g["only_adapter"]), str(g["neither"]),
          "–" if g["difference"] is None else f"{g['difference']:+.3f}", f"{g['mcnemar_p']:.2g}"]])
    lines.append("")
    lines.append(f"Tool calls on tasks that both solve: base {number(calls['base'])}, "
                 f"{adapter_name} {number(calls['adapter'])}. Intervals are 95% Wilson.")
    if several:
        lines.append(f"The second table counts pairs: each task was sampled {len(result['base']['samples'])} times. "
                     f"pass@1 of each sample: base {_samples(result['base'])}; {adapter_name} "
                     f"{_samples(result['adapter'])}.")
    if g["excluded"]:
        lines.append(f"{g['excluded']} {'pairs' if several else 'tasks'} are not graded with both and are left out of "
                     "the second table.")
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table with aligned columns, the first left and the others right."""
    widths = [max(3, *(len(row[i]) for row in [header, *rows])) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join("-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return [line(header), rule, *map(line, rows)]


def percent(r: Mapping[str, Any]) -> str:
    """`0.547 [0.425, 0.663]`: pass@1 with its interval."""
    return "–" if r["pass_at_1"] is None else f"{r['pass_at_1']:.3f} [{r['ci95'][0]:.3f}, {r['ci95'][1]:.3f}]"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fmean(values) if values else None


def _samples(r: Mapping[str, Any]) -> str:
    spread = r["variance_between_samples"]
    return f"{', '.join('–' if v is None else f'{v:.3f}' for v in r['samples'])} (variance " + (
        "–)" if spread is None else f"{spread:.2g})")


def _sample(cell: Cell) -> int:
    return cell.get("sample", 0)


def _task_means(graded: Iterable[Cell]) -> dict[str, float]:
    """Task -> share of its graded samples that are correct."""
    outcomes: dict[str, list[bool]] = {}
    for cell in graded:
        outcomes.setdefault(cell["task"], []).append(cell["status"] == "correct")
    return {task: fmean(values) for task, values in outcomes.items()}


def _by_key(cells: Iterable[Cell]) -> dict[Key, Cell]:
    found: dict[Key, Cell] = {}
    for cell in cells:
        key = cell["task"], _sample(cell)
        if key in found:
            raise ValueError(f"two cells of task {cell['task']} for one model: keep the last one of each")
        found[key] = cell
    return found
