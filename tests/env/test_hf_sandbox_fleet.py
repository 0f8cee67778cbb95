"""What the HF Sandboxes of one env server share: breaker, cancelled starts, kills that fail, labels."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from recipe import hf_sandbox, hf_sandbox_jobs, hub, sandbox_costs
from recipe.config import Settings
from recipe.gate import Gate
from recipe.hf_sandbox import CAUSE, Fleet, PinnedHFSandbox


class Api:
    """The two calls of HfApi that end a sandbox; `refuse` of them fail."""

    def __init__(self, refuse: int = 0) -> None:
        self.refuse, self.cancelled = refuse, []

    def cancel_job(self, job_id, namespace):
        if self.refuse:
            self.refuse -= 1
            raise ConnectionError("reset")
        self.cancelled.append(job_id)


def fleet(tmp_path, api=None, attempts=3, **more) -> Fleet:
    return Fleet(api or Api(), "me", {}, "cpu-basic", 1500, attempts, Gate(),
                 sandbox_costs.Costs(tmp_path, "cpu-basic"), **more)


@pytest.mark.parametrize(("outcomes", "closed"), [
    ([False] * 7, False), ([False] * 8, True), ([True] * 6 + [False] * 6, False), ([True] * 6 + [False] * 7, True),
    ([True, False] * 20, False)])
def test_the_breaker_closes_when_most_starts_fail(tmp_path, outcomes, closed):
    made = fleet(tmp_path)

    async def run() -> None:
        for outcome in outcomes:
            made.noted(outcome, "no machine")

    asyncio.run(run())
    assert bool(made.gate.reason(CAUSE)) == closed
    if closed:
        assert "sandboxes did not start (no machine). The next attempt follows in 60 s" in made.gate.reason()


def test_the_breaker_opens_by_itself_waits_longer_each_time_and_forgets(tmp_path):
    made = fleet(tmp_path, cool=0.05)

    async def run() -> list[float]:
        waits = []
        for _ in range(2):
            for _ in range(8):
                made.noted(False)
            waits.append(made.cool)
            await asyncio.wait_for(made.gate.passed(), 30)
        made.noted(True)
        return waits

    assert asyncio.run(run()) == [0.1, 0.2] and made.cool == hf_sandbox.COOL_S


def environment(tmp_path) -> PinnedHFSandbox:
    (tmp_path / "environment").mkdir(exist_ok=True)
    return PinnedHFSandbox(tmp_path / "environment", "task", "trial", TrialPaths(tmp_path),
                           EnvironmentConfig(docker_image="image"), logger=logging.getLogger())


class Slow(Fleet):
    """A fleet whose sandboxes are made, or with `broken` are not, when `go` is set."""

    broken = False

    def create(self, image):
        self.began.set()
        self.go.wait(60)
        if self.broken:
            raise TimeoutError("not ready")
        return SimpleNamespace(id="made", close=lambda: None)


def slow_fleet(tmp_path, broken=False) -> Slow:
    made = fleet(tmp_path)
    made.__class__ = Slow
    made.began, made.go, made.broken = threading.Event(), threading.Event(), broken
    hf_sandbox.use(made)
    return made


def counted(tmp_path) -> tuple[int, int]:
    totals = sandbox_costs.read(tmp_path) or {"started": 0, "failed": 0}
    return totals["started"], totals["failed"]


@pytest.mark.parametrize(("broken", "cancelled", "counts"), [(False, ["made"], (1, 0)), (True, [], (0, 1))])
def test_a_start_that_is_cancelled_leaves_no_sandbox_and_is_counted(tmp_path, broken, cancelled, counts):
    made = slow_fleet(tmp_path, broken)

    async def run() -> None:
        start = asyncio.create_task(environment(tmp_path).start(False))
        await asyncio.to_thread(made.began.wait, 60)
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled() and made.api.cancelled == []
        made.go.set()  # the thread goes on, as threads do
        while counted(tmp_path) == (0, 0):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert made.api.cancelled == cancelled and counted(tmp_path) == counts


def test_a_start_under_way_at_the_end_of_the_server_is_counted_once(tmp_path):
    made = slow_fleet(tmp_path)
    start = threading.Thread(target=lambda: made.end(made.start("image")))
    start.start()
    assert made.began.wait(60)
    made.costs.ended()
    assert counted(tmp_path) == (0, 1)
    made.go.set()
    start.join(60)
    assert counted(tmp_path) == (0, 1) and made.api.cancelled == ["made"]


def test_the_end_of_the_server_waits_for_a_count_that_a_rollout_is_writing(tmp_path, monkeypatch):
    """The slow disk of a loaded machine: the rollout's thread has taken the sandbox and not yet written its cost."""
    costs, writing, go, found = sandbox_costs.Costs(tmp_path, "cpu-basic"), threading.Event(), threading.Event(), []
    costs.begins("a")
    costs.ready("a", "x")
    write = sandbox_costs.write_atomic

    def slow(*args) -> None:
        writing.set()
        go.wait(60)
        write(*args)

    monkeypatch.setattr(sandbox_costs, "write_atomic", slow)

    def end_of_server() -> None:
        costs.ended()
        found.append(counted(tmp_path))

    rollout, server = threading.Thread(target=costs.ended, args=("x",)), threading.Thread(target=end_of_server)
    rollout.start()
    assert writing.wait(60)
    server.start()
    server.join(0.5)  # enough for one that does not wait
    go.set()
    server.join(60)
    rollout.join(60)
    assert found == [(1, 0)]


def test_what_a_killed_server_had_is_counted_by_the_next(tmp_path, monkeypatch):
    killed = sandbox_costs.Costs(tmp_path, "cpu-basic")
    killed.begins("a")
    killed.begins("b")
    killed.ready("b", "x")
    assert sandbox_costs.read(tmp_path) is None, "none has ended"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    for _ in range(2):
        sandbox_costs.Costs(tmp_path, "cpu-basic").ended(longest=1800)
        assert counted(tmp_path) == (1, 1)
    totals = sandbox_costs.read(tmp_path)
    assert (totals["minutes"], totals["dollars"]) == (60, 0.01)
    assert sandbox_costs.line(totals).startswith("sandboxes: 1 ran, 1 did not start, 60.0 minutes on cpu-basic")


@pytest.mark.parametrize(("refuse", "cancelled"), [(2, ["x"]), (99, [])])
def test_a_kill_is_tried_again_and_its_failure_told(tmp_path, monkeypatch, capsys, refuse, cancelled):
    monkeypatch.setattr(hub, "FIRST_WAIT", 0.01)
    closed = []
    made = fleet(tmp_path, Api(refuse))
    made.create = lambda image: SimpleNamespace(id="x", close=lambda: closed.append(1))
    made.end(made.start("image"))
    made.costs.ended()
    assert sandbox_costs.read(tmp_path)["started"] == 1, "counted once"
    assert made.api.cancelled == cancelled and closed
    assert ("WARN cancelling sandbox x: still failing" in capsys.readouterr().out) == (not cancelled)


def test_labels_follow_the_adapter_over_jobs_and_tell_jobs_apart(tmp_path):
    def labels(job: str, adapter: str = "me/a", run: str = "1") -> dict[str, str]:
        made = Settings.load({"ADAPTER_REPO": adapter, "RUN_DIR": str(tmp_path / run)})
        return hf_sandbox_jobs.labels_of(made, {"JOB_ID": job} if job else {})

    first, resumed, other, unnamed = labels("j1"), labels("j2", run="2"), labels("j1", "me/b"), labels("", "")
    assert first["recipe-run"] == resumed["recipe-run"] != other["recipe-run"]
    assert (first["recipe-owner"], resumed["recipe-owner"]) == ("j1", "j2")
    assert unnamed["recipe-owner"].startswith("machine-") and labels("", "", "2") != unnamed
    assert all(value.replace("-", "").isalnum() for value in [*first.values(), *unnamed.values()])


def error(status: int) -> Exception:
    err = RuntimeError(str(status))
    err.response = SimpleNamespace(status_code=status, headers={})
    return err


class Places(Api):
    """`where` maps (namespace, job) to its stage, or a namespace to the HTTP status that it answers."""

    def __init__(self, where) -> None:
        super().__init__()
        self.where = where

    def whoami(self):
        return {"name": "me"}

    def list_jobs(self, **_):
        return [SimpleNamespace(id="left", labels={"recipe-owner": "j1"})]

    def inspect_job(self, job_id, namespace):
        found = self.where.get((namespace, job_id), self.where.get(namespace, 404))
        if isinstance(found, int):
            raise error(found)
        return SimpleNamespace(status=SimpleNamespace(stage=found))


@pytest.mark.parametrize(("where", "left"), [
    ({}, ["left"]), ({("payer", "j1"): "COMPLETED"}, ["left"]), ({("payer", "j1"): "RUNNING"}, []),
    ({("org", "j1"): "RUNNING"}, []), ({("me", "j1"): "RUNNING"}, []), ({("me", "j1"): "ERROR"}, ["left"]),
    ({"org": 403}, []), ({"org": 403, ("payer", "j1"): "CANCELED"}, ["left"])])
def test_the_job_of_a_sandbox_may_have_another_owner(where, left):
    found = hf_sandbox_jobs.left_over(Places(where), "payer", {"recipe-run": "r", "recipe-owner": "j2"}, "org/adapter")
    assert found == left
