"""The sandbox API fails in the middle of an evaluation: its cells have no grade, and the same command goes on."""

from __future__ import annotations

import dataclasses

from test_eval_faults import RightAtLast
from test_hf_sandbox import World, place, registry, world  # noqa: F401 (fixtures)

from recipe.cells import CellLog
from recipe.evaluation import fill, held_out_tasks, make_jobs


def test_api_errors_of_the_sandboxes_make_no_cell_wrong(world: World, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PUBLIC_URL", world.proxy.address(world.job, world.port))
    script = world.engine.script = RightAtLast(at=1)
    script.fault = lambda: world.hub.fail(10_000, 500, "POST /api/jobs/me$")
    server = world.start(SANDBOX_STARTS="1")
    try:
        settings = dataclasses.replace(server.settings, n_tasks=1, eval_concurrency=1, eval_retries=0)
        jobs = make_jobs(held_out_tasks(settings), 1, "p", "a", "adapter", "scripted", "scripted")
        log = CellLog(tmp_path / "cells.jsonl")
        fill(settings, jobs, log)
        assert [c["status"] for c in log.read()] == ["correct", "ungraded"]
        assert "500" in log.read()[1]["reason"]
        world.hub.faults.clear()
        fill(settings, [job for job in jobs if job not in log.graded(jobs)[0]], log)
        assert [c["status"] for c in log.of(jobs).values()] == ["correct"] * 2
    finally:
        server.stop()
