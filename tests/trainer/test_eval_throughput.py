"""The arithmetic of bench/eval_throughput.py; its run needs the whole stack."""

from __future__ import annotations

import pytest

from bench import eval_throughput
from recipe.cells import InfrastructureError

CELL = {"status": "correct", "tokens": 60, "seconds": 10.0, "reason": "",
        "phases": {"sandbox": 1.0, "agent": 5.0, "model": 3.0, "verifier": 0.5}}


def test_rates_and_shares():
    found = eval_throughput.measure([CELL, CELL | {"status": "wrong", "tokens": 0}, CELL], 15.0)
    assert found["cells_per_minute"] == 12 and found["tokens_per_second"] == 8
    assert found["mean_calls_under_way"] == pytest.approx(3 * 3 / 15)
    assert found["seconds_a_cell"] == CELL["phases"] | {"other": 0.5}
    head, _, row = eval_throughput.table({"one by one": found}).splitlines()
    assert [c.strip() for c in row.split("|")[2:-1]] == ["12.00", "8.0", "0.60", "1.00", "5.00", "3.00", "0.50", "0.50"]
    assert head.count("|") == row.count("|")


def test_a_cell_that_did_not_run_spoils_the_measurement():
    with pytest.raises(InfrastructureError, match="1 of 2 cells did not run.*sandbox died"):
        eval_throughput.measure([CELL, CELL | {"status": "ungraded", "reason": "sandbox died"}], 15.0)
