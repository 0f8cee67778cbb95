"""Statistics and tables of recipe/report.py against independent computations."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from recipe import report


def cell(task: str, status: str, **more) -> dict:
    return {"task": task, "status": status, "tool_calls": 2, "tokens": 100} | more


# Newcombe (1998), Statistics in Medicine 17:857-872, table I: Wilson score intervals without continuity correction.
@pytest.mark.parametrize("successes, n, low, high", [
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_wilson_published_values(successes, n, low, high):
    assert report.wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys_and_statsmodels(table):
    successes, n = table
    scipys = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert report.wilson(successes, n) == pytest.approx((scipys.low, scipys.high), abs=1e-9)
    assert report.wilson(successes, n) == pytest.approx(proportion_confint(successes, n, method="wilson"), abs=1e-9)


@given(*[st.integers(0, 300)] * 4)
def test_a_random_table_gives_statsmodels_mcnemar(both, only_base, only_adapter, neither):
    kinds = [("correct", "correct")] * both + [("correct", "wrong")] * only_base + [
        ("wrong", "correct")] * only_adapter + [("wrong", "wrong")] * neither
    random.Random(0).shuffle(kinds)
    result = report.compare([cell(f"t{i}", b) for i, (b, _) in enumerate(kinds)],
                            [cell(f"t{i}", a) for i, (_, a) in enumerate(kinds)])
    g = result["agreement"]
    assert [g[k] for k in ("both", "only_base", "only_adapter", "neither")] == [both, only_base, only_adapter, neither]
    exact = mcnemar([[both, only_base], [only_adapter, neither]], exact=True).pvalue
    assert g["mcnemar_p"] == pytest.approx(exact, rel=1e-9)
    if only_base + only_adapter:
        assert g["mcnemar_p"] == pytest.approx(binomtest(only_base, only_base + only_adapter).pvalue, rel=1e-9)
    if kinds:
        assert result["adapter"]["pass_at_1"] == pytest.approx((both + only_adapter) / len(kinds))
        assert result["adapter"]["ci95"] == pytest.approx(
            proportion_confint(both + only_adapter, len(kinds), method="wilson"), abs=1e-9)


def test_wilson_edges():
    assert report.wilson(0, 0) == (0.0, 1.0)
    assert report.wilson(0, 7)[0] == 0.0 and report.wilson(7, 7)[1] == 1.0
    assert report.wilson(7, 7)[0] == pytest.approx(1 - report.wilson(0, 7)[1])
    with pytest.raises(ValueError, match="3 successes in 2 trials"):
        report.wilson(3, 2)


def test_mcnemar_large_counts_do_not_overflow():
    assert report.mcnemar_exact(2000, 2000) == 1.0
    assert 0 < report.mcnemar_exact(900, 1100) < 1e-4


def test_rate_leaves_ungraded_out_of_the_rate_but_counts_it():
    r = report.rate([cell("a", "correct"), cell("b", "wrong"), cell("c", "ungraded", tool_calls=None, tokens=None)])
    assert (r["cells"], r["correct"], r["wrong"], r["ungraded"]) == (3, 1, 1, 1)
    assert r["pass_at_1"] == 0.5 and r["mean_tool_calls"] == 2
    assert report.rate([])["pass_at_1"] is None


def test_agreement_counts_pairs_graded_with_both():
    base = [cell("t1", "correct", tool_calls=4), cell("t2", "correct"), cell("t3", "wrong"), cell("t4", "wrong"),
            cell("t5", "ungraded"), cell("t6", "correct")]
    adapter = [cell("t1", "correct", tool_calls=1), cell("t2", "wrong"), cell("t3", "correct"), cell("t4", "wrong"),
               cell("t5", "correct")]
    g = report.compare(base, adapter)["agreement"]
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


def samples(task: str, outcomes: str, **more) -> list[dict]:
    """Cells of the samples of a task: c correct, w wrong, u ungraded."""
    status = {"c": "correct", "w": "wrong", "u": "ungraded"}
    return [cell(task, status[o], sample=j, **more) for j, o in enumerate(outcomes)]


def test_several_samples_are_averaged_over_tasks_with_the_variance_between_them():
    base = [*samples("t1", "cwc"), *samples("t2", "www"), *samples("t3", "uuw"), *samples("t4", "ccc")]
    adapter = [*samples("t1", "ccc"), *samples("t2", "wwc"), *samples("t3", "ccc"), *samples("t4", "ccc")]
    result = report.compare(base, adapter)
    r = result["base"]
    assert r["pass_at_1"] == pytest.approx((2 / 3 + 0 + 0 + 1) / 4), "every task weighs the same"
    assert r["samples"] == pytest.approx([2 / 3, 1 / 3, 2 / 4])
    assert r["variance_between_samples"] == pytest.approx(np.var([2 / 3, 1 / 3, 1 / 2], ddof=1))
    assert (r["cells"], r["correct"], r["wrong"], r["ungraded"]) == (12, 5, 5, 2) and report.task_count(r) == 4
    g = result["agreement"]
    assert [g[k] for k in ("pairs", "tasks", "excluded", "both", "only_base", "only_adapter", "neither")] == [
        10, 4, 2, 5, 0, 3, 2]
    assert g["mcnemar_p"] == pytest.approx(0.25), "three tasks are better with the adapter, none worse"
    text = report.render(result)
    assert "exact McNemar p, by task" in text and "each task was sampled 3 times" in text
    assert "base 0.667, 0.333, 0.500 (variance 0.028)" in text


def test_the_interval_of_several_samples_lies_between_that_of_the_tasks_and_that_of_all_cells():
    same = [c for i in range(40) for c in samples(f"t{i}", "cccc" if i < 10 else "wwww")]
    assert report.rate(same)["ci95"] == pytest.approx(report.wilson(10, 40)), "a copy of a sample says nothing new"
    rng = np.random.default_rng(0)
    mixed = [c for i in range(40) for c in samples(f"t{i}", "".join(rng.choice(["c", "w"], 4, p=[0.25, 0.75])))]
    r = report.rate(mixed)
    wide, narrow = report.wilson(r["correct"] / 4, 40), report.wilson(r["correct"], 160)
    assert wide[0] < r["ci95"][0] <= narrow[0] and narrow[1] <= r["ci95"][1] < wide[1]
    assert report.rate(samples("t0", "cc") + samples("t1", "cc"))["ci95"] == pytest.approx(report.wilson(2, 2))


def test_the_interval_of_several_samples_covers_the_true_rate():
    """2,000 evaluations of 60 tasks with rates of their own, 3 samples each: at least 94% of the intervals hold it."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        rates = rng.beta(0.6, 0.9, 60)
        means = rng.binomial(3, rates) / 3
        low, high = report.clustered_wilson(list(means), 180)
        covered += low <= 0.6 / 1.5 <= high
    assert covered / 2000 > 0.94


def test_compare_refuses_two_cells_of_one_task():
    with pytest.raises(ValueError, match="two cells of task t1"):
        report.compare([cell("t1", "correct"), cell("t1", "wrong")], [])
