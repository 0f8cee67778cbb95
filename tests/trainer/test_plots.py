"""The curves show the figures they are given, without a display."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from PIL import Image

from recipe import plots, report
from recipe.config import REPO


def rate(correct: int, n: int = 20, calls: int = 3) -> dict:
    return report.rate([{"task": f"t{i}", "status": "correct" if i < correct else "wrong", "tool_calls": calls,
                         "tokens": 9} for i in range(n)])


def point(step: int, correct: int, n: int = 20, calls: int = 3) -> dict:
    return {"step": step, "adapter": rate(correct, n, calls), "tasks": 20}


def test_learning_curve_has_a_point_and_an_interval_a_checkpoint_and_the_base_as_a_band():
    summary = {"checkpoints": [point(200, 12, calls=2), point(100, 8)], "base": rate(5, calls=4)}
    score, calls = plots.learning_figure(summary).axes
    (bar,) = score.containers
    assert list(bar.lines[0].get_xdata()) == [100, 200] and list(bar.lines[0].get_ydata()) == [0.4, 0.6]
    ends = [segment[:, 1].tolist() for segment in bar.lines[2][0].get_segments()]
    assert ends[0] == pytest.approx(report.wilson(8, 20)) and ends[1] == pytest.approx(report.wilson(12, 20))
    (band,) = score.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx(report.wilson(5, 20))
    assert [list(line.get_ydata()) for line in calls.lines] == [[4, 4], [3, 2]]


def test_checkpoints_without_a_graded_cell_and_an_empty_summary_can_be_drawn(tmp_path):
    edge = point(100, 20)
    edge["adapter"]["ci95"] = [0.8, 1 - 2e-16]  # below its own rate of 1
    for points, base in (([edge], None), ([point(100, 0, 0), point(200, 3)], None), ([], None),
                         ([point(100, 0, 0)], rate(0, 0))):
        plots.learning_curve({"checkpoints": points, "base": base}, tmp_path / "curve.png")
        Image.open(tmp_path / "curve.png").verify()
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


def test_training_curves_leave_steps_without_a_figure_out():
    rng = random.Random(0)
    records = [{"step": step, "reward_mean": rng.random(), "tool_calls": 2.0, "tokens": 900, "seconds": 3.0,
                "ratio_mean": 1.0, "ratio_min": 0.9, "ratio_max": 50.0} for step in range(1, 41)]
    records[5] |= {"ratio_mean": None, "ratio_min": None, "ratio_max": None, "reward_mean": None}
    reward, ratio, calls, speed = plots.training_figure(records).axes
    assert len(reward.lines[0].get_xdata()) == 39 and 6 not in reward.lines[0].get_xdata()
    last = [r["reward_mean"] for r in records[-plots.SMOOTH:]]
    assert reward.lines[1].get_ydata()[-1] == pytest.approx(sum(last) / len(last))
    assert set(speed.lines[0].get_ydata()) == {300.0} and len(calls.lines[0].get_xdata()) == 40
    assert ratio.get_ylim()[1] == 2.0, "one wild token must not flatten the mean"


def test_curves_need_neither_display_nor_pyplot(tmp_path):
    code = ("import sys; from pathlib import Path; from recipe import plots; "
            "plots.training_curves([], Path(sys.argv[1])); assert 'matplotlib.pyplot' not in sys.modules")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t.png")], cwd=REPO, check=True, env={})
    assert Image.open(tmp_path / "t.png").size[0] > 1000
