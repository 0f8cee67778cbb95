"""Checkpoints that can be trusted: sealed by a manifest, compared with the settings, found again after any crash.

The trainer's checkpoint-N holds the adapter (adapter_model.safetensors, adapter_config.json, the tokenizer) and, in
files of their own, the state of the training (optimizer, scheduler, random numbers, position in the tasks). `seal` adds

    settings.json    the settings that it was trained with, and `data`, where its tasks come from
    manifest.json    size and SHA-256 of every file; written last, atomically

A folder without a manifest that fits was cut off while it was written, and is never resumed from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipe import task_source
from recipe.config import Settings
from recipe.watchdog import write_atomic

MANIFEST = "manifest.json"
SETTINGS = "settings.json"
NAME = re.compile(r"checkpoint-(\d+)")
# Not needed to resume: a pickle of our own arguments, and PEFT's empty model card.
LEFT_OUT = ("training_args.bin", "README.md", MANIFEST)
# A resumed run may differ in these: how long, where and how fast it runs, and how it is watched and evaluated.
FREE = {
    "preset", "resume", "adapter_repo", "max_steps", "n_tasks", "max_inflight", "token_budget", "attention",
    "sandbox", "sandbox_runtime", "keep_sandbox", "opencode_integrity", "engine", "public_port", "policy_port",
    "policy_host", "policy_gpu", "env_port", "policy_address", "env_host", "env_address", "gpu_memory_utilization",
    "prefix_caching", "save_steps", "stall_limit", "eval_concurrency", "eval_retries", "k_samples", "eval_poll",
    "eval_idle_limit", "trackio_project", "trackio_space", "run_dir", "cache_dir", "canary_every", "canary_tolerance",
    "ratio_stop", "keep_trials", "route_check_every", "forwarder", "sandbox_starts", "sandbox_flavor",
    "sandbox_namespace", "per_device_batch", "print_completions",
    "gpus", "weight_sync", "weight_sync_timeout", "environments",
}


class CheckpointError(RuntimeError):
    """The newest checkpoint must not be resumed from; the message says why and what to do."""


def step_of(folder: Path) -> int:
    return int(NAME.fullmatch(folder.name)[1])


def step_and_file(path: str) -> tuple[int, str] | None:
    """(10, "adapter_config.json") of "checkpoint-10/adapter_config.json"; None for any other path."""
    folder, _, file = path.partition("/")
    match = NAME.fullmatch(folder)
    return (int(match[1]), file) if match and file and "/" not in file else None


def file_record(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as the manifest has them."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def training_settings(settings: Settings) -> dict[str, Any]:
    """The settings that make the policy what it is, in JSON's types. A local model counts by its folder's name."""
    values = {name: value for name, value in settings.as_dict().items() if name not in FREE}
    if Path(settings.model).is_dir():
        values["model"] = Path(settings.model).name
    return json.loads(json.dumps(values))


def seal(folder: Path, settings: Settings) -> Path:
    """Adds settings and manifest to a checkpoint that was written to its end."""
    data = {"data": task_source.of_run(Path(settings.run_dir), "train")}
    write_atomic(folder / SETTINGS, json.dumps(training_settings(settings) | data, indent=1) + "\n")
    files = {path.name: file_record(path) for path in sorted(folder.iterdir())
             if path.is_file() and path.name not in LEFT_OUT and not path.name.startswith(".")}
    write_atomic(folder / MANIFEST, json.dumps({"step": step_of(folder), "files": files}, indent=1) + "\n")
    return folder


def read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest if isinstance(manifest["files"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage(folder: Path, names: Iterable[str] | None = None) -> str | None:
    """What is wrong with a checkpoint, or None when every file, or each of `names`, is as the manifest says."""
    manifest = read_manifest(folder)
    if manifest is None:
        return "it was not written to its end"
    for name in manifest["files"] if names is None else names:
        record = manifest["files"].get(name)
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_record(folder / name) != record:
            return f"{name} is not what its manifest says"
    return None


def size_damage(manifest: dict[str, Any], sizes: Mapping[str, int]) -> str | None:
    """What is wrong with a checkpoint elsewhere, of which file names and sizes are known; None when all are there."""
    for name, record in manifest["files"].items():
        if sizes.get(name) != record["size"]:
            return f"{name} has {sizes.get(name, 0)} bytes there, its manifest says {record['size']}"
    return None


def folders(root: Path) -> list[Path]:
    """The checkpoints in `root`, whole or not, by their steps."""
    return sorted((p for p in root.glob("checkpoint-*") if NAME.fullmatch(p.name)), key=step_of)


def newest_checkpoint(root: Path, broken: dict[str, str] | None = None) -> Path | None:
    """The checkpoint in `root` with the most steps that is whole; says which ones were passed over, and notes in
    `broken` what is wrong with each."""
    for folder in reversed(folders(root)):
        wrong = damage(folder)
        if wrong is None:
            return folder
        print(f"WARN {folder.name} is passed over: {wrong}", flush=True)
        if broken is not None:
            broken[str(folder)] = wrong
    return None


def check_settings(folder: Path, settings: Settings) -> None:
    """Raises CheckpointError when the checkpoint was trained with other settings, and names them."""
    now, then = training_settings(settings), json.loads((folder / SETTINGS).read_text())
    lines = [f"  {name.upper()}: {then[name]!r} in the checkpoint, {now[name]!r} now"
             for name in now if name in then and then[name] != now[name]]
    if lines:
        raise CheckpointError(
            f"{folder.name} was trained with other settings:\n" + "\n".join(lines) + "\nSet them as they were to go "
            "on, or start anew with RESUME=never and another RUN_DIR (and ADAPTER_REPO).")
