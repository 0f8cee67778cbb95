"""Harbor's hf-sandbox environment, started and ended so that thousands of rollouts can rely on it.

Everything that happens inside a sandbox is Harbor's. Ours: labels by which a sandbox is found again, an idle limit
above the agent's, attempts with back-off, no sandbox that nobody knows of when a start is cancelled, a kill that is
tried again, the count of minutes, and a breaker: while most starts fail, no new ones are made.

Used by import path: `EnvironmentConfig(import_path="recipe.hf_sandbox:PinnedHFSandbox")`, after `use(Fleet(...))`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, override

from harbor.environments.hf_sandbox import HFSandboxEnvironment
from huggingface_hub import Sandbox

from recipe import hf_sandbox_jobs, hub
from recipe.gate import Gate
from recipe.sandbox_costs import Costs

START_LIMIT_S = 150.0  # scheduling, image and server of one sandbox; Harbor allows the whole start 600 s
FIRST_WAIT_S = 5.0  # before the second attempt, doubled for each further one
CAUSE = "sandboxes"
# The breaker: of the last WINDOW starts, at least ENOUGH were tried and more than half failed.
WINDOW, ENOUGH = 20, 8
COOL_S, LONGEST_COOL_S = 60.0, 600.0
LASTING = {401, 402, 403}  # HTTP statuses that no further attempt changes: token, credit, rights


@dataclass
class Fleet:
    """What all sandboxes of one env server share. `start`, `create` and `end` block; the rest is the event loop's."""

    api: Any
    namespace: str
    labels: dict[str, str]
    flavor: str
    idle_limit: int  # seconds
    attempts: int
    gate: Gate
    costs: Costs
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    cool: float = COOL_S

    def start(self, image: str) -> Sandbox:
        """`create`, counted whatever becomes of it and of who asked for it."""
        attempt = f"start-{secrets.token_hex(8)}"
        self.costs.begins(attempt)
        try:
            sandbox = self.create(image)
        except BaseException:
            self.costs.ended(attempt)
            raise
        self.costs.ready(attempt, sandbox.id)
        return sandbox

    def create(self, image: str) -> Sandbox:
        """One attempt. No token goes in: the sandbox runs what a model writes."""
        return Sandbox.create(image=image, flavor=self.flavor, idle_timeout=self.idle_limit, labels=self.labels,
                              namespace=self.namespace, forward_hf_token=False, start_timeout=START_LIMIT_S)

    def end(self, sandbox: Sandbox) -> None:
        """Cancels the sandbox's Job and counts its minutes. What can't be cancelled is left to the sweep."""
        try:
            hf_sandbox_jobs.cancel(self.api, self.namespace, sandbox.id)
        except hub.HubError as err:
            print(f"[env] WARN {err} It is cancelled when the run ends, or ends when idle.", flush=True)
        finally:
            sandbox.close()
            self.costs.ended(sandbox.id)

    def noted(self, started: bool, why: str = "", lasting: bool = False) -> None:
        """The outcome of one attempt; may close the gate, for longer each time it has to."""
        self.recent.append(started)
        failed = self.recent.count(False)
        if started and failed * 2 <= len(self.recent):
            self.cool = COOL_S
        if started or self.gate.reason(CAUSE):
            return
        if lasting or (len(self.recent) >= ENOUGH and failed * 2 > len(self.recent)):
            self.gate.close(CAUSE, f"{failed} of the last {len(self.recent)} sandboxes did not start ({why}). "
                                   f"The next attempt follows in {self.cool:.0f} s.")
            asyncio.get_running_loop().call_later(self.cool, self._again)
            self.cool = min(LONGEST_COOL_S, self.cool * 2)

    def _again(self) -> None:
        self.recent.clear()
        self.gate.open(CAUSE, "sandboxes are tried again.")


_fleet: Fleet | None = None


def use(fleet: Fleet) -> None:
    """Harbor makes the environments from plain values, so what they share is kept here."""
    global _fleet
    _fleet = fleet


class PinnedHFSandbox(HFSandboxEnvironment):
    """Harbor's HF Sandbox under a Fleet."""

    @override
    async def start(self, force_build: bool) -> None:
        assert _fleet is not None, "recipe.hf_sandbox.use() comes first"
        self._sandbox = await self._started(_fleet)
        try:
            if workdir := self.task_env_config.workdir:
                await asyncio.to_thread(self._sandbox.files.mkdir, workdir)
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await asyncio.shield(self.stop(delete=True))
            raise

    async def _started(self, fleet: Fleet) -> Sandbox:
        """A ready sandbox. Raises what the last attempt raised."""
        for attempt in range(1, fleet.attempts + 1):
            try:
                sandbox = await self._create(fleet)
            except Exception as err:
                lasting = hub.status_of(err) in LASTING
                fleet.noted(False, hub.explain(err, fleet.namespace), lasting)
                if lasting or attempt == fleet.attempts or fleet.gate.reason(CAUSE):
                    raise
                print(f"[env] sandbox of {self.environment_name}: start {attempt} of {fleet.attempts} failed: {err}",
                      flush=True)
                await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
            else:
                fleet.noted(True)
                return sandbox
        raise AssertionError("unreachable")

    async def _create(self, fleet: Fleet) -> Sandbox:
        """Fleet.start in a thread. A thread can't be cancelled: when its caller is, the sandbox ends once made."""
        lock, made, unwanted = threading.Lock(), [], threading.Event()

        def work() -> Sandbox:
            sandbox = fleet.start(self.task_env_config.docker_image)
            with lock:
                if not unwanted.is_set():
                    made.append(sandbox)
                    return sandbox
            fleet.end(sandbox)
            raise RuntimeError("the start was cancelled")

        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            with lock:
                unwanted.set()
            if made:
                threading.Thread(target=fleet.end, args=(made[0],)).start()
            raise

    @override
    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is None or not delete:
            return
        assert _fleet is not None
        await asyncio.to_thread(_fleet.end, sandbox)
