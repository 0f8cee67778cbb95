"""The results that a model card may show: those of this very adapter, whose figures are those of its cells.

Results files are written by eval_adapter.py and eval_watch.py (recipe/evaluation.py), cells.jsonl lies beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe import json_lines, report
from recipe.adapters import AdapterError, adapter_digest
from recipe.results_repo import OF_CHECKPOINT

Result = dict[str, Any]
FIGURES = ("base", "adapter", "agreement", "by")


def choose(folder: Path, adapter: Path) -> Path | None:
    """The results file in `folder` that evaluated `adapter`: of a full evaluation rather than of the watcher's subset,
    then the newest; None without one."""
    digest = adapter_digest(adapter)
    found = [(not OF_CHECKPOINT.fullmatch(file.name), result.get("time") or 0, file)
             for file in sorted(folder.glob("*_results.json"))
             if (result := _read(file)) and result.get("adapter_digest") == digest]
    return max(found)[2] if found else None


def load(file: Path, adapter: Path) -> Result:
    """The results in `file`. Raises AdapterError when they are about other weights, or their figures are not those of
    their own counts and of the cells beside them."""
    result = _read(file)
    if not result or not set(FIGURES) <= result.keys():
        raise AdapterError(f"{file} is no results file of eval_adapter.py")
    if result.get("adapter_digest") != adapter_digest(adapter):
        raise AdapterError(f"{file} is not about {adapter}: its cells were made with other adapter weights. Evaluate "
                           "this adapter (run_eval.sh --adapter …) or name another --results")
    recomputed = from_cells(file, result)
    if recomputed is None:
        _check_counts(file, result)
    elif wrong := _difference(result, recomputed):
        raise AdapterError(f"{file}: {wrong}, by the cells in {file.parent.name}/: a card shows what was measured. "
                           "Evaluate again to write the file anew")
    return result


def from_cells(file: Path, result: Mapping[str, Any]) -> Result | None:
    """The comparison computed anew from the cells of `result`; None when they are not all beside it."""
    wanted = {"base": "", result.get("adapter_name"): result["adapter_digest"]}
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for lines in sorted(file.parent.glob("*cells.jsonl")):
        for cell in json_lines.read(lines):
            made = cell.get("made_with") or {}
            if made.get("protocol") == result.get("protocol") and wanted.get(cell.get("model")) == made.get("adapter"):
                cells[cell["model"], cell["task"], cell.get("sample", 0)] = cell
    of_model = {name: [c for key, c in cells.items() if key[0] == name] for name in wanted}
    if any(len(of_model[name]) != result[kind]["cells"]
           for name, kind in zip(wanted, ("base", "adapter"), strict=True)):
        return None  # a repository without its cells, or with those of another set of tasks
    return report.compare(of_model["base"], of_model[result["adapter_name"]])


def _check_counts(file: Path, result: Mapping[str, Any]) -> None:
    """Without cells the rates must at least follow from the counts (one sample a task)."""
    for name in ("base", "adapter"):
        r = result[name]
        graded = r["correct"] + r["wrong"]
        if "samples" not in r and graded:
            expected = {"pass_at_1": r["correct"] / graded, "ci95": list(report.wilson(r["correct"], graded))}
            if wrong := _difference({key: r[key] for key in expected}, expected, f"{name}."):
                raise AdapterError(f"{file}: {wrong}, by its own counts: a card shows what was measured")


def _difference(found: Any, expected: Any, at: str = "") -> str | None:
    """The first place at which two JSON values differ, floats beyond rounding."""
    if isinstance(expected, Mapping):
        wrong = (_difference(found.get(key) if isinstance(found, Mapping) else None, value, f"{at}{key}.")
                 for key, value in expected.items())
        return next(filter(None, wrong), None)
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        wrong = (_difference(a, b, f"{at}{i}.") for i, (a, b) in enumerate(zip(found, expected, strict=True)))
        return next(filter(None, wrong), None)
    numbers = all(isinstance(value, (int, float)) for value in (found, expected))
    if math.isclose(found, expected, abs_tol=1e-9) if numbers else found == expected:
        return None
    return f"{at.rstrip('.')} is {found!r}, it should be {expected!r}"


def curve(folder: Path, adapter: Path, step: int) -> dict[str, Any] | None:
    """The learning curve in `folder`/summary.json; None without one, or when it is about other checkpoints.

    Raises AdapterError when a point of it is not what the results file of its checkpoint says.
    """
    summary = _read(folder / "summary.json")
    if not summary or not summary.get("checkpoints"):
        return None
    for point in summary["checkpoints"]:
        file = folder / f"checkpoint-{point['step']}_results.json"
        result = _read(file)
        if not result or (wrong := _difference({k: point.get(k) for k in ("base", "adapter")},
                                               {k: result.get(k) for k in ("base", "adapter")})):
            reason = wrong if result else "that file is missing"
            raise AdapterError(f"{folder / 'summary.json'}: its checkpoint-{point['step']} does not come from "
                               f"{file.name}: {reason}")
        if point["step"] == step and result.get("adapter_digest") != adapter_digest(adapter):
            return None
    return summary


def _read(file: Path) -> Result | None:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
