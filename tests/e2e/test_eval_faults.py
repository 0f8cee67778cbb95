"""The infrastructure fails in the middle of an evaluation: no cell is wrong for it, and the same command goes on."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from env_server_process import AGENT_LIMITS, EnvServer, start_server
from header_proxy import HeaderProxy
from loopback import free_ports
from scripted_engine import Reply, ScriptedEngine, tool_results

from recipe import local_tasks
from recipe.cells import CellLog, InfrastructureError
from recipe.config import Settings
from recipe.evaluation import fill, held_out_tasks, make_jobs

N_TASKS = 2


class RightAtLast:
    """A model that writes a wrong answer first, then the right one: work that is cut off in between would be graded
    wrong. Calls `fault` before the second turn of rollout number `at`."""

    def __init__(self, at: int = 0) -> None:
        self.pipelines = {task.instruction.strip(): task.pipeline for split, n in (("train", 2), ("test", 4))
                          for task in local_tasks.generate(split, n, seed=0)}
        self.at, self.rollouts, self.fault = at, itertools.count(1), lambda: None

    def __call__(self, request: dict) -> Reply:
        asked = "".join(str(m["content"]) for m in request["messages"] if m["role"] == "user")
        pipeline = next(p for instruction, p in self.pipelines.items() if instruction in asked.replace("\\n", "\n"))
        match len(tool_results(request)):
            case 0:
                return Reply(calls=(("bash", {"command": "echo none > /workdir/answer.txt", "description": "Guess"}),))
            case 1:
                if next(self.rollouts) == self.at:
                    self.fault()
                return Reply(calls=(("bash", {"command": f"{pipeline} > /workdir/answer.txt", "description": "Do"}),))
        return Reply(text="The answer is written.")


@dataclass
class Stack:
    server: EnvServer
    proxy: HeaderProxy
    engine: ScriptedEngine
    settings: Settings

    def engine_dies(self) -> None:
        """No new connection reaches it, and none that is open has an answer any more."""
        self.engine.script = lambda request: Reply(wait=self._cut)
        self.engine.server.shutdown()
        self.engine.server.server_close()
        self._cut()

    def _cut(self) -> None:
        raise BrokenPipeError

    def engine_returns(self) -> None:
        """A new one, if the old one is dead."""
        self.engine.script = RightAtLast()
        if self.engine.server.socket.fileno() < 0:
            self.engine = ScriptedEngine(RightAtLast(), port=self.engine.port).__enter__()


@pytest.fixture(scope="module")
def stack(run_dir) -> Iterator[Stack]:
    public, engine_port = free_ports(2)  # nobody else gets that of the engine while it is gone
    with HeaderProxy(public) as proxy:
        engine = ScriptedEngine(RightAtLast(), port=engine_port).__enter__()
        server = start_server(run_dir, engine.port, public_url=proxy.url, PUBLIC_PORT=str(proxy.target))
        settings = dataclasses.replace(server.settings, n_tasks=N_TASKS, eval_concurrency=2, eval_retries=1)
        running = Stack(server, proxy, engine, settings)
        yield running
        server.stop()
        running.engine.__exit__()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["route 404", "engine gone"])
def test_a_fault_in_the_middle_makes_no_cell_wrong(stack: Stack, tmp_path, monkeypatch, fault):
    monkeypatch.setenv("PUBLIC_URL", stack.proxy.url)
    jobs = make_jobs(held_out_tasks(stack.settings), 1, "p", "a", "adapter", "scripted", "scripted")
    for limit in AGENT_LIMITS:
        script, stopped = RightAtLast(at=3), ""
        if fault == "route 404":
            script.fault, down = (lambda: setattr(stack.proxy, "status", 404)), "route of the sandboxes .* answers 404"
        else:
            script.fault, down = stack.engine_dies, "policy server .* is down"
        stack.engine.script, log = script, CellLog(tmp_path / f"cells-{limit}.jsonl")
        try:
            fill(dataclasses.replace(stack.settings, agent_timeout=limit), jobs, log)
        except InfrastructureError as err:
            stopped = str(err)
        before = log.read()
        stack.proxy.status = 0
        stack.engine_returns()
        if not any("agent timeout" in cell["reason"] for cell in before):
            break
    assert re.search(down, stopped), stopped
    assert [c for c in before if c["status"] == "wrong"] == [] and len(log.graded(jobs)[0]) < len(jobs)
    assert sum(c["status"] == "correct" for c in before) >= 1, "cells that were finished are kept"

    left = [job for job in jobs if job not in log.graded(jobs)[0]]
    fill(stack.settings, left, log)
    assert [c["status"] for c in log.of(jobs).values()] == ["correct"] * 2 * N_TASKS
    assert log.read()[: len(before)] == before
