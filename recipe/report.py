"""Numbers of a base-against-adapter comparison: intervals, agreement, exact McNemar test, and their table.

Works on evaluation cells as plain dictionaries (one line of eval/cells.jsonl each: `task`, `model`, `status` =
correct | wrong | ungraded, `tool_calls`, `tokens`, and a group such as `difficulty`). A cell that did not run is
ungraded: it is counted and shown, and is in no rate. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

Cell = Mapping[str, Any]
GRADED = ("correct", "wrong")
Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a proportion; (0, 1) when nothing was observed.

    Unlike the normal approximation it stays inside [0, 1] and keeps its coverage at rates near 0 and 1.
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


def mcnemar_exact(only_base: int, only_adapter: int) -> float:
    """Two-sided exact McNemar p-value: the discordant pairs against a fair coin, in exact integers."""
    n, smaller = only_base + only_adapter, min(only_base, only_adapter)
    if smaller < 0:
        raise ValueError(f"counts must not be negative: {only_base}, {only_adapter}")
    tail = sum(math.comb(n, k) for k in range(smaller + 1))
    return min(1.0, 2 * tail / 2**n)


def rate(cells: Iterable[Cell]) -> dict[str, Any]:
    """Counts, pass@1 over the graded cells (None where there are none), its 95% interval and mean costs."""
    cells = list(cells)
    correct = sum(c["status"] == "correct" for c in cells)
    graded = [c for c in cells if c["status"] in GRADED]
    return {
        "cells": len(cells), "correct": correct, "wrong": len(graded) - correct, "ungraded": len(cells) - len(graded),
        "pass_at_1": correct / len(graded) if graded else None,
        "ci95": list(wilson(correct, len(graded))),
        "mean_tool_calls": _mean(c["tool_calls"] for c in graded),
        "mean_tokens": _mean(c["tokens"] for c in graded),
    }


def agreement(base: Mapping[str, Cell], adapter: Mapping[str, Cell]) -> dict[str, Any]:
    """Which tasks each of the two solves, over tasks graded with both; `excluded` counts the others."""
    tasks = sorted(base.keys() | adapter.keys())
    pairs = [(base[t], adapter[t]) for t in tasks
             if t in base and t in adapter and base[t]["status"] in GRADED and adapter[t]["status"] in GRADED]
    solved = [(b["status"] == "correct", a["status"] == "correct") for b, a in pairs]
    both = [pair for pair, s in zip(pairs, solved, strict=True) if s == (True, True)]
    only_base, only_adapter = solved.count((True, False)), solved.count((False, True))
    return {
        "tasks": len(pairs), "excluded": len(tasks) - len(pairs),
        "both": len(both), "only_base": only_base, "only_adapter": only_adapter,
        "neither": solved.count((False, False)),
        "difference": (only_adapter - only_base) / len(pairs) if pairs else None,
        "mcnemar_p": mcnemar_exact(only_base, only_adapter),
        "tool_calls_where_both_solve": {"base": _mean(b["tool_calls"] for b, _ in both),
                                        "adapter": _mean(a["tool_calls"] for _, a in both)},
    }


def compare(base: Iterable[Cell], adapter: Iterable[Cell], group_by: Sequence[str] = ("difficulty", "kind")
            ) -> dict[str, Any]:
    """The whole comparison as one JSON-ready dictionary; at most one cell a task and model."""
    base_of, adapter_of = _by_task(base), _by_task(adapter)
    groups: dict[str, Any] = {}
    for key in group_by:
        values = {c[key] for c in [*base_of.values(), *adapter_of.values()] if c.get(key)}
        if len(values) > 1:  # a single group would repeat the overall row
            groups[key] = {value: {"base": rate(c for c in base_of.values() if c.get(key) == value),
                                   "adapter": rate(c for c in adapter_of.values() if c.get(key) == value)}
                           for value in sorted(values)}
    return {"base": rate(base_of.values()), "adapter": rate(adapter_of.values()),
            "agreement": agreement(base_of, adapter_of), "by": groups}


def render(result: Mapping[str, Any], adapter_name: str = "adapter") -> str:
    """A Markdown table of `compare`'s result that also reads well in a terminal."""
    rows = [("all tasks", result["base"], result["adapter"])]
    for values in result["by"].values():
        rows += [(f"· {value}", pair["base"], pair["adapter"]) for value, pair in values.items()]
    lines = markdown_table(
        ["", "tasks", "base pass@1", f"{adapter_name} pass@1", "base calls", "calls", "ungraded"],
        [[label, str(max(b["cells"], a["cells"])), percent(b), percent(a), number(b["mean_tool_calls"]),
          number(a["mean_tool_calls"]), f"{b['ungraded']} + {a['ungraded']}"] for label, b, a in rows])
    g = result["agreement"]
    calls = g["tool_calls_where_both_solve"]
    lines += [""] + markdown_table(
        ["both solve", "only base", f"only {adapter_name}", "neither", "difference", "exact McNemar p"],
        [[str(g["both"]), str(g["only_base"]), str(g["only_adapter"]), str(g["neither"]),
          "–" if g["difference"] is None else f"{g['difference']:+.3f}", f"{g['mcnemar_p']:.2g}"]])
    lines.append("")
    lines.append(f"Tool calls on tasks that both solve: base {number(calls['base'])}, "
                 f"{adapter_name} {number(calls['adapter'])}. Intervals are 95% Wilson.")
    if g["excluded"]:
        lines.append(f"{g['excluded']} tasks are not graded with both and are left out of the second table.")
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


def _by_task(cells: Iterable[Cell]) -> dict[str, Cell]:
    found: dict[str, Cell] = {}
    for cell in cells:
        if cell["task"] in found:
            raise ValueError(f"two cells of task {cell['task']} for one model: keep the last one of each")
        found[cell["task"]] = cell
    return found
