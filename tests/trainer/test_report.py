"""Statistics and tables of recipe/report.py against independent computations."""

from __future__ import annotations

import random
from fractions import Fraction
from math import comb, sqrt

import pytest

from recipe import report


def cell(task: str, status: str, **more) -> dict:
    return {"task": task, "status": status, "tool_calls": 2, "tokens": 100} | more


# Newcombe (1998), Statistics in Medicine 17:857-872, table I: Wilson score intervals without continuity correction.
@pytest.mark.parametrize("successes, n, low, high", [
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_wilson_published_values(successes, n, low, high):
    assert report.wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_bounds_solve_the_score_equation():
    """Each bound is the p at which the score test statistic equals z: the interval's definition."""
    rng = random.Random(0)
    for _ in range(200):
        n = rng.randint(2, 400)
        k = rng.randint(1, n - 1)
        for bound in report.wilson(k, n):
            assert abs(k / n - bound) / sqrt(bound * (1 - bound) / n) == pytest.approx(report.Z95, rel=1e-9)


def test_wilson_edges():
    assert report.wilson(0, 0) == (0.0, 1.0)
    assert report.wilson(0, 7)[0] == 0.0 and report.wilson(7, 7)[1] == 1.0
    assert report.wilson(7, 7)[0] == pytest.approx(1 - report.wilson(0, 7)[1])
    with pytest.raises(ValueError, match="3 successes in 2 trials"):
        report.wilson(3, 2)


def test_mcnemar_equals_the_summed_binomial():
    """Sum of all outcomes at most as likely as the observed one, in exact fractions (what scipy's binomtest does)."""
    for b in range(25):
        for c in range(25):
            n = b + c
            chance = [Fraction(comb(n, k), 2**n) for k in range(n + 1)]
            expected = sum(p for p in chance if p <= chance[b])
            assert report.mcnemar_exact(b, c) == pytest.approx(float(expected), rel=1e-12), (b, c)


def test_mcnemar_large_counts_do_not_overflow():
    assert report.mcnemar_exact(2000, 2000) == 1.0
    assert 0 < report.mcnemar_exact(900, 1100) < 1e-4


def test_rate_leaves_ungraded_out_of_the_rate_but_counts_it():
    r = report.rate([cell("a", "correct"), cell("b", "wrong"), cell("c", "ungraded", tool_calls=None, tokens=None)])
    assert (r["cells"], r["correct"], r["wrong"], r["ungraded"]) == (3, 1, 1, 1)
    assert r["pass_at_1"] == 0.5 and r["mean_tool_calls"] == 2
    assert report.rate([])["pass_at_1"] is None


def test_agreement_counts_pairs_graded_with_both():
    base = {"t1": cell("t1", "correct", tool_calls=4), "t2": cell("t2", "correct"), "t3": cell("t3", "wrong"),
            "t4": cell("t4", "wrong"), "t5": cell("t5", "ungraded"), "t6": cell("t6", "correct")}
    adapter = {"t1": cell("t1", "correct", tool_calls=1), "t2": cell("t2", "wrong"), "t3": cell("t3", "correct"),
               "t4": cell("t4", "wrong"), "t5": cell("t5", "correct")}
    g = report.agreement(base, adapter)
    assert [g[k] for k in ("tasks", "excluded", "both", "only_base", "only_adapter", "neither")] == [4, 2, 1, 1, 1, 1]
    assert g["tool_calls_where_both_solve"] == {"base": 4, "adapter": 1}
    assert g["mcnemar_p"] == 1.0 and g["difference"] == 0.0


def test_compare_groups_and_render():
    base = [cell(f"t{i}", "correct" if i < 2 else "wrong", difficulty="hard" if i % 2 else "medium", kind="sum")
            for i in range(10)]
    adapter = [cell(f"t{i}", "correct" if i < 8 else "wrong", difficulty="hard" if i % 2 else "medium", kind="sum")
               for i in range(9)] + [cell("t9", "ungraded", difficulty="hard", kind="sum")]
    result = report.compare(base, adapter)
    assert set(result["by"]) == {"difficulty"}  # one kind only: no row that repeats the first
    assert result["by"]["difficulty"]["hard"]["adapter"]["cells"] == 5
    text = report.render(result)
    assert "0.200 [0.057, 0.510]" in text and "| · hard " in text and "0 + 1" in text
    assert "1 tasks are not graded with both" in text
    widths = {len(line) for line in text.split("\n\n")[0].splitlines()}
    assert len(widths) == 1, "columns of the terminal table must align"


def test_compare_refuses_two_cells_of_one_task():
    with pytest.raises(ValueError, match="two cells of task t1"):
        report.compare([cell("t1", "correct"), cell("t1", "wrong")], [])
