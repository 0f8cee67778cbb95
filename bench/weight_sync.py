"""Weight sync, broken down: merge and pack, wire, pause, load, resume, and the gap that a request in flight sees.

    python3 -m bench.weight_sync --gpus 1                       CUDA IPC
    python3 -m bench.weight_sync --gpus 2 --ways auto,stock     one NCCL broadcast beside TRL's own NCCL client
    … --keep-cache                                              requests in flight keep what is computed of them
    … --kill                                                    then kills the engine in the middle of a sync

A random model of LFM2.5-2.6B's shape with a LoRA of rank 32, moved a little before each sync, against a vLLM that
serve_policy.sh started, while a request is streamed. After the last sync of our own ways the engine's parameters are
compared bit by bit (two exact sums each) with the merged weights. Seconds in the JSON, milliseconds in the table.
vLLM computes a request in flight anew after a pause, prompt and what it has sampled, by the new weights; so the gap has
this prefill in it, and `context` tells how many tokens that were. --keep-cache leaves it out, for comparison: what is
sampled then comes from the new weights on keys and values of the old ones.
Limits: on one GPU bytes are read once and written once at the card's copy rate; between two they cross NVLink, 450 GB/s
each way on an H200 (datasheet). The stock way is TRL 1.15.0's: pause, merge in place, send, unmerge, resume.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.common import Server, card_limits, parser, report, require_gpu, spread, stream_tokens
from bench.model import make_model
from recipe.config import Settings

NVLINK = 450e9  # bytes a second, one way
PARTS = ("pack", "flat_receive", "stage", "merge", "pause", "flat_apply", "send", "unmerge", "resume")


class InFlight:
    """Requests that are streamed one after the other; `gap(a, b)` is the longest silence that touches [a, b], and
    `context` the tokens of the request by now."""

    PROMPT = list(range(100, 612))

    def __init__(self, url: str, model: str, max_tokens: int = 16_384):
        self.times: list[float] = []
        self.begins = 0  # chunks that came before this request's
        self.stop = False
        self.failed: list[Exception] = []
        self.thread = threading.Thread(target=self._run, args=(url, model, max_tokens), daemon=True)
        self.thread.start()

    def _run(self, url: str, model: str, max_tokens: int) -> None:
        try:
            while not self.stop:
                self.begins = len(self.times)
                for now in stream_tokens(url, model, self.PROMPT, max_tokens):
                    self.times.append(now)
                    if self.stop:
                        return
        except Exception as err:  # noqa: BLE001 - the engine is killed on purpose at the end
            self.failed.append(err)

    @property
    def context(self) -> int:
        return len(self.PROMPT) + len(self.times) - self.begins

    def gap(self, begin: float, end: float) -> float:
        near = [t for t in self.times if begin - 0.5 <= t <= end + 0.5]
        return max((b - a for a, b in zip(near, near[1:], strict=False) if b >= begin and a <= end), default=0.0)


def load_policy(folder: Path):
    """The trainer's model: base in bf16, adapter in fp32 with every B away from zero."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from recipe.lfm2 import lora_config

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().requires_grad_(False)
    model = get_peft_model(model, lora_config(Settings.load({"MODEL": str(folder)})))
    torch.manual_seed(1)
    nudge(model, 0.02)
    return model


def nudge(model: Any, by: float = 1e-3) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter), alpha=by)


def ours(model: Any, transfer: Any) -> dict[str, float]:
    """One sync as recipe/group_trainer.py does it."""
    import torch

    from recipe.weight_sync import merged_parameters

    torch.cuda.synchronize()
    transfer.stage(merged_parameters(model))
    began = time.monotonic()
    transfer.pause()
    transfer.send_weights(iter(()))
    transfer.resume()
    ended = time.monotonic()
    return {**transfer.timings, "paused": ended - began, "began": began, "ended": ended,
            "copy": transfer.applied["seconds"], "way": transfer.applied["way"]}


def stock(model: Any, transfer: Any) -> dict[str, float]:
    """One sync as TRL's _sync_weight_merged does it."""
    import torch
    from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params

    torch.cuda.synchronize()
    marks = [time.monotonic()]
    transfer.pause()
    marks.append(time.monotonic())
    model.merge_adapter()
    torch.cuda.synchronize()
    marks.append(time.monotonic())
    transfer.send_weights((name, parameter.detach()) for name, parameter in _iter_vllm_named_params(model))
    marks.append(time.monotonic())
    model.unmerge_adapter()
    torch.cuda.synchronize()
    marks.append(time.monotonic())
    transfer.resume()
    marks.append(time.monotonic())
    names = ("pause", "merge", "send", "unmerge", "resume")
    return {**dict(zip(names, (b - a for a, b in zip(marks, marks[1:], strict=False)), strict=True)),
            "paused": marks[-1] - marks[0], "began": marks[0], "ended": marks[-1]}


def stock_transfer(model: Any, url: str, timeout: int) -> Any:
    """TRL's client, with the manifest that its trainer makes."""
    from accelerate import PartialState
    from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    PartialState()  # the client's logger refuses to work without it
    manifest = [(name, str(p.dtype).split(".")[-1], list(p.shape)) for name, p in _iter_vllm_named_params(model)]
    names, dtypes, shapes = map(list, zip(*manifest, strict=True))
    return WeightTransferClient(VLLMClient(url, 600.0),
                                {"names": names, "dtype_names": dtypes, "shapes": shapes}, timeout)


def wrong_parameters(model: Any, transfer: Any) -> list[str]:
    """Names of the engine's parameters whose memory is not that of the merged weights, q, k, v and w1, w3 fused."""
    import torch

    from recipe.vllm_weights import checksum
    from recipe.weight_sync import merged_parameters

    there = transfer._worker("flat_checksums")
    fused: dict[str, list[torch.Tensor]] = {}
    for name, tensor in merged_parameters(model):
        for part in ("q_proj", "k_proj", "v_proj"):
            name = name.replace(f"self_attn.{part}.", "self_attn.qkv_proj.")
        name = name.replace("feed_forward.w1.", "feed_forward.w13.").replace("feed_forward.w3.", "feed_forward.w13.")
        fused.setdefault(name, []).append(tensor)
    aliases = {name.replace(".short_conv.", ".conv."): name for name in there}  # vLLM's name of the conv block
    wrong = []
    for name, parts in fused.items():
        key = name if name in there else aliases.get(name)
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if key is None or there[key] != checksum(whole):
            wrong.append(name if key else f"{name} (not among the engine's parameters)")
    return wrong


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    options.add_argument("--ways", default="auto", help="auto, stock or both with a comma; ours first")
    options.add_argument("--syncs", type=int, default=20)
    options.add_argument("--timeout", type=int, default=45, help="WEIGHT_SYNC_TIMEOUT")
    options.add_argument("--keep-cache", action="store_true", help="pause without dropping keys and values (ours only)")
    options.add_argument("--kill", action="store_true", help="at the end, kill the engine during a sync of ours")
    options.add_argument("--port", type=int, default=8401)
    args = options.parse_args(argv)
    require_gpu(args.gpus)
    import torch

    from recipe.gpu_weight_transfer import flat_transfer

    make_model(args.model)
    limits = card_limits()
    torch.cuda.empty_cache()
    rows, details, checks, mine = [], {}, {}, None
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    settings = {"GPUS": str(args.gpus), "MAX_MODEL_LEN": "32768", "POLICY_GPU": seen.split(",")[args.gpus - 1]}
    with Server(args.model, args.port, Path("/tmp/bench-weight-sync.log"), **settings) as server:
        model = load_policy(args.model)
        nbytes = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" not in n)
        floor = 2 * nbytes / limits["copy_bytes_per_s"] if args.gpus == 1 else nbytes / NVLINK
        flight = InFlight(server.url, server.model)
        for way in args.ways.split(","):
            transfer = (stock_transfer(model, server.url, args.timeout) if way == "stock"
                        else flat_transfer(server.url, False, args.timeout))
            if way != "stock":
                mine, transfer.clear_cache = transfer, not args.keep_cache
            began = time.monotonic()
            transfer.init_weight_transfer()
            once = stock if way == "stock" else ours
            found = [once(model, transfer)]  # the first makes buffers and groups, and runs the engine's own loader
            first = time.monotonic() - began
            for _ in range(args.syncs):
                nudge(model)
                time.sleep(0.5)
                context = flight.context
                found.append(once(model, transfer) | {"context": context})
            time.sleep(0.7)
            for sync in found:
                sync["gap"] = flight.gap(sync["began"], sync["ended"])
            steady = found[1:]
            name = "stock NCCL" if way == "stock" else transfer.way
            row: dict[str, Any] = {"way": name, "syncs": len(steady)}
            for part in ("paused", "gap", *PARTS, "copy"):
                if part in steady[0]:
                    middle, _, most = spread([sync[part] for sync in steady])
                    row[f"{part} ms"] = round(middle * 1000, 1)
                    if part in ("paused", "gap"):
                        row[f"{part} max ms"] = round(most * 1000, 1)
            row |= {"context": round(spread([sync["context"] for sync in steady])[0]), "first s": round(first, 2),
                    "GB": round(nbytes / 1e9, 2), "limit ms": round(floor * 1000, 1)}
            rows.append(row)
            details[name] = found
            if way != "stock":
                checks[name] = {"engine's parameters that differ": wrong_parameters(model, transfer),
                                "second and later syncs by": steady[0]["way"]}
        if args.kill and mine:
            timer = threading.Timer(0.02, server.kill)
            began = time.monotonic()
            timer.start()
            try:
                for _ in range(100):
                    ours(model, mine)
                checks["killed"] = "nothing was noticed"
            except Exception as err:  # noqa: BLE001 - what it is, is the result
                checks["killed"] = {"seconds to the error": round(time.monotonic() - began, 2),
                                    "error": f"{type(err).__name__}: {err}"[:300]}
        flight.stop = True
    names = sorted({key for row in rows for key in row}, key=lambda k: list(rows[0]).index(k) if k in rows[0] else 99)
    rows = [{name: row.get(name) for name in names} for row in rows]
    report("weight_sync", args, rows, checks=checks, limits=limits, tokens_in_flight=len(flight.times), syncs=details)
    return 1 if any(c.get("engine's parameters that differ") for c in checks.values() if isinstance(c, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
