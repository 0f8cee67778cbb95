"""What the benchmarks share: the model they run on, the server, the card's own limits, and how results are kept.

Ratios are taken within one run: the limits that stand beside the figures (copy bandwidth, bf16 matrix rate) are
measured on the same card, minutes before or after.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import requests

from bench.model import FOLDER
from recipe.config import REPO
from recipe.exits import EXIT_TERMINATED, EXIT_UNAVAILABLE, Parser

RESULTS = REPO / "bench" / "results"
PACKAGES = ("torch", "vllm", "transformers", "trl", "peft", "accelerate")


def parser(doc: str, model: bool = True) -> argparse.ArgumentParser:
    made = Parser(doc)
    if model:
        made.add_argument("--model", type=Path, default=FOLDER,
                          help="model folder; made with random weights of LFM2.5-2.6B's shape where it is missing "
                          "(default: %(default)s)")
    made.add_argument("--out", type=Path, help="JSON file (default: bench/results/<name>-<gpus>gpu-<time>.json)")
    return made


def require_gpu(count: int = 1) -> None:
    """Ends the script with 69 where there are fewer GPUs."""
    import torch

    if torch.cuda.device_count() < count:
        print(f"this benchmark needs {count} GPU{'s' if count > 1 else ''}, and torch sees "
              f"{torch.cuda.device_count()} here", file=sys.stderr)
        sys.exit(EXIT_UNAVAILABLE)


def versions() -> dict[str, str]:
    """Versions of what ran, and the card."""
    import torch

    found = {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "gpus": str(torch.cuda.device_count()),
                  "cuda": str(torch.version.cuda)}
        smi = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                             capture_output=True, text=True)
        found["driver"] = smi.stdout.split()[0] if smi.stdout else "unknown"
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    def cell(value: Any) -> str:
        return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)

    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    return "\n".join(lines + ["| " + " | ".join(cell(row.get(name)) for name in names) + " |" for row in rows])


def report(name: str, args: argparse.Namespace, rows: list[dict[str, Any]], ran: dict[str, str] | None = None,
           **more: Any) -> None:
    """Prints the table and writes everything as JSON. `ran`: the versions, where others measured than those here."""
    ran = versions() if ran is None else ran
    print("\n" + table(rows))
    for key, value in more.items():
        print(f"{key}: {json.dumps(value, default=str)}")
    print("ran:", ", ".join(f"{k} {v}" for k, v in ran.items()))
    gpus = ran.get("gpus", "0")
    path = args.out or RESULTS / f"{name}-{gpus}gpu-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = {k: str(v) for k, v in vars(args).items() if k not in ("out", "profile")}
    path.write_text(json.dumps({"name": name, "versions": ran, "arguments": arguments, "rows": rows, **more},
                               indent=1, default=str) + "\n")
    print(f"written to {path}", flush=True)


def spread(values: list[float]) -> tuple[float, float, float]:
    """(median, smallest, largest)"""
    return statistics.median(values), min(values), max(values)


def seconds_of(function: Any, repeat: int = 10, warm: int = 3) -> float:
    """Median seconds of a CUDA operation by events."""
    import torch

    taken = []
    for i in range(warm + repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if i >= warm:
            taken.append(begin.elapsed_time(end) / 1000)
    return statistics.median(taken)


def card_limits() -> dict[str, float]:
    """Measured: bytes a second of a device copy, reads and writes counted, and bf16 FLOP/s of 8192³ on random data."""
    import torch

    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds_of(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / seconds_of(lambda: a @ b)
    return {"copy_bytes_per_s": copy, "bf16_flops": rate}


def end_on_sigterm() -> None:
    """From here on SIGTERM raises SystemExit(EXIT_TERMINATED): what was measured can be kept, servers are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))


class Server:
    """`with Server(model, GPUS="1", …) as server:` a policy server of serve_policy.sh that is healthy at server.url."""

    def __init__(self, model: Path, port: int, log: Path, mode: str = "train", limit: float = 600, **settings: str):
        self.url, self.model, self.log, self.limit = f"http://127.0.0.1:{port}", str(model), log, limit
        environ = {**os.environ, "PRESET": "job", "ENGINE": "vllm", "MODEL": self.model, "POLICY_PORT": str(port),
                   "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"), **settings}
        log.parent.mkdir(parents=True, exist_ok=True)
        self.file = log.open("wb")
        self.started = time.monotonic()
        end_on_sigterm()  # a time limit that ends the benchmark must not leave the server on the card
        self.process = subprocess.Popen(["bash", "serve_policy.sh", "--mode", mode], cwd=REPO, env=environ,
                                        stdout=self.file, stderr=subprocess.STDOUT, start_new_session=True)

    def __enter__(self) -> Server:
        try:
            return self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self) -> Server:
        while True:
            if self.process.poll() is not None or time.monotonic() - self.started > self.limit:
                print(f"the policy server did not start; the end of {self.log}:\n"
                      + self.log.read_text(errors="replace")[-4000:], file=sys.stderr)
                sys.exit(EXIT_UNAVAILABLE)
            with contextlib.suppress(requests.RequestException):
                if requests.get(self.url + "/health", timeout=5).status_code == 200:
                    self.start_seconds = time.monotonic() - self.started
                    print(f"policy server healthy after {self.start_seconds:.0f} s (log {self.log})", flush=True)
                    return self
            time.sleep(0.5)

    def __exit__(self, *_: Any) -> None:
        # Short: a server has nothing to save, and a benchmark at its time limit has to write what it measured.
        for sign, grace in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, sign)
                self.process.wait(grace)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the engine's own process, where its parent went first
        self.file.close()

    def kill(self) -> None:
        """kill -9 of everything that the server is."""
        os.killpg(self.process.pid, signal.SIGKILL)


def stream_tokens(url: str, model: str, prompt: list[int], max_tokens: int, **fields: Any) -> Iterator[float]:
    """Arrival time (time.monotonic) of each chunk of a streamed completion of up to `max_tokens` tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True,
            "stream": True, **fields}
    with requests.post(url + "/v1/completions", json=body, stream=True, timeout=600) as response:
        response.raise_for_status()
        # As they arrive: reading lines byte by byte would make this process the limit.
        for chunk in response.iter_content(chunk_size=None):
            for _ in range(chunk.count(b"data: {")):
                yield time.monotonic()
