"""The policy servers of the tests, as serve_policy.sh starts them on vLLM: one for each configuration."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from loopback import free_port

from bench.common import Server
from bench.model import FOLDER, TINY, make_model

LOGS = Path("/tmp/lfm-gpu-tests")
# A start of vLLM counts what others take of the card meanwhile as its own; a cache of a given size is not counted out,
# so that servers may start side by side and beside tests.
CACHE = "--kv-cache-memory-bytes 4294967296"
ONE_GPU = "two processes speak NCCL on two GPUs only, and torch sees one"  # why a test of two is skipped


@dataclass(frozen=True)
class Configuration:
    model: Path
    mode: str
    gpus: int = 1
    caching: bool = False  # of prefixes


CONFIGURATIONS = {
    "tiny-train": Configuration(TINY, "train"),  # pausing, weight routes, our worker extension
    "tiny-eval": Configuration(TINY, "eval"),  # adapters at run time
    "tiny-cached": Configuration(TINY, "train", caching=True),
    "large-train": Configuration(FOLDER, "train"),
    "tiny-nccl": Configuration(TINY, "train", gpus=2),  # on the second GPU
    "large-nccl": Configuration(FOLDER, "train", gpus=2),
}


class Servers:
    """`start` begins, `get` waits for the server to be healthy, `kill` ends it hard: who asks next gets a new one."""

    def __init__(self) -> None:
        self.started: dict[str, Server] = {}
        self.healthy: set[str] = set()
        self.failed: Counter[str] = Counter()  # starts and servers that failed

    def start(self, name: str) -> None:
        if name in self.started:
            return
        what = CONFIGURATIONS[name]
        if what.model == FOLDER:
            make_model(FOLDER)
        seen = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
        # Each with a compile cache of its own: two that start together would write to the same one.
        self.started[name] = Server(what.model, free_port(), LOGS / f"{name}.log", what.mode, **{
            "GPUS": str(what.gpus), "POLICY_GPU": seen[what.gpus - 1], "MAX_MODEL_LEN": "4096",
            "MAX_OUTPUT_TOKENS": "256", "GPU_MEMORY_UTILIZATION": "0.15", "PREFIX_CACHING": str(int(what.caching)),
            "VLLM_FLAGS": CACHE, "VLLM_CACHE_ROOT": str(LOGS / f"cache-{name}")})
        # Ends the tests as Ctrl-C does, with their summary, and takes the servers along.
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def get(self, name: str) -> Server:
        if name in self.healthy and self.started[name].process.poll() is not None:
            self.failed[name] += 1  # a test was its death; the next ones need not be
            self.end(name)
        while name not in self.healthy:
            if self.failed[name] == 2:  # once beside the others, once alone
                raise RuntimeError(f"the policy server {name} does not start or dies, see {LOGS / name}.log")
            self.start(name)
            try:
                self.started[name].__enter__()
                self.healthy.add(name)
            except SystemExit:
                self.failed[name] += 1
                self.end(name)
        return self.started[name]

    def kill(self, name: str) -> None:
        self.started[name].kill()
        self.end(name)

    def end(self, name: str) -> None:
        self.healthy.discard(name)
        self.started.pop(name).__exit__()

    def close(self) -> None:
        for server in self.started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGTERM)  # all at once, then wait for each
        for server in self.started.values():
            server.__exit__()
        self.started.clear()
