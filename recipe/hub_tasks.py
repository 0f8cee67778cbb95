"""Pinned tasks from a Hub dataset: fetch at a revision, check the hashes, patch task.toml.

The recipe needs three changes to a published task: a prebuilt `docker_image` (the hf-sandbox backend takes nothing
else), one CPU and 4 GiB, and no HF_TOKEN inside a sandbox that runs a model's commands.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipe import hub

FILES = ("task.toml", "instruction.md", "environment/Dockerfile", "environment/pull_bucket.py", "tests/test.sh",
         "tests/grader.py")
DOCKER_IMAGE = "docker.io/savatar101/env-data-agent-train:base"
ENVIRONMENT = {"docker_image": DOCKER_IMAGE, "cpus": 1, "memory_mb": 4096}
GRADER_SHA256 = "16f906e9248fa8b7e1141939e425e88e59d52d65e98e360bbacef3720a43629f"

Fetch = Callable[[str], Path]  # path inside the dataset -> local file


class TaskError(RuntimeError):
    """A task can't be used as published; the message names it, what differs and what to do."""


@dataclass(frozen=True)
class PinnedTask:
    name: str
    difficulty: str
    sha256: str  # of instruction.md


@dataclass(frozen=True)
class TaskList:
    dataset: str
    revision: str
    tasks: tuple[PinnedTask, ...]
    grader: str = ""  # SHA-256 of tests/grader.py, the same in all tasks; empty is the recipe's

    @classmethod
    def read(cls, path: Path) -> TaskList:
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["dataset"], data["revision"], tuple(PinnedTask(**task) for task in data["tasks"]),
                   data.get("grader_sha256", ""))


def hub_fetch(dataset: str, revision: str) -> Fetch:
    """Downloads single files into the Hub cache; what is there already costs no request (the revision is a commit)."""
    from huggingface_hub import hf_hub_download

    def fetch(path: str) -> Path:
        try:
            return Path(hub.repeat(lambda: hf_hub_download(dataset, path, repo_type="dataset", revision=revision),
                                   dataset, f"downloading {path}"))
        except hub.HubError as err:
            raise TaskError(f"{dataset}@{revision}: {err}") from err

    return fetch


def notebook(name: str) -> str:
    """The notebook that a task asks about: its questions are called <notebook>_qa_<number>."""
    return name.rsplit("_qa_", 1)[0]


def check_disjoint(train: TaskList, test: TaskList) -> None:
    """Raises TaskError when the lists share a task, a notebook or an instruction."""
    for what, key in (("task", lambda t: t.name), ("notebook", lambda t: notebook(t.name)),
                      ("instruction (by its hash)", lambda t: t.sha256)):
        shared = {key(task) for task in train.tasks} & {key(task) for task in test.tasks}
        if shared:
            raise TaskError(f"training and held-out tasks share the {what} {sorted(shared)[0]} and {len(shared) - 1} "
                            "more, an evaluation would mean nothing: restore data/train.json and data/test.json")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def patch_task_toml(text: str) -> str:
    """task.toml with ENVIRONMENT set and HF_TOKEN removed wherever a command in the sandbox would get it, the verifier
    too: what the agent left running there could read it. All else is unchanged. Raises ValueError where that fails."""
    want = tomllib.loads(text)
    if "environment" not in want:
        raise ValueError("it has no [environment] table")
    want["environment"].update(ENVIRONMENT)
    for part in want.values():
        if isinstance(part, dict) and isinstance(part.get("env"), dict):
            part["env"].pop("HF_TOKEN", None)

    lines, table = [], ""
    for line in text.splitlines():
        if header := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
            table = header[1].strip()
        key = line.split("=")[0].strip().strip("\"'")
        if (table == "environment" and key in ENVIRONMENT) or (table.endswith(".env") and key == "HF_TOKEN"):
            continue
        lines.append(line)
        if header and table == "environment":
            lines += [f"{name} = {json.dumps(value)}" for name, value in ENVIRONMENT.items()]
    patched = "\n".join(lines) + "\n"
    try:
        unequal = tomllib.loads(patched) != want
    except tomllib.TOMLDecodeError:
        unequal = True
    if unequal:
        raise ValueError("its [environment] is laid out in a way that this patch does not know")
    return patched


def check(task: PinnedTask, contents: dict[str, bytes], grader: str = "") -> None:
    """Raises TaskError when the instruction or the grader is not the pinned one."""
    for path, want in (("instruction.md", task.sha256), ("tests/grader.py", grader or GRADER_SHA256)):
        got = sha256(contents[path])
        if got != want:
            raise TaskError(f"{task.name}: {path} has SHA-256 {got}, pinned is {want}. The download is damaged or the "
                            "list belongs to another revision: remove it from the Hub cache and run again.")


def load_hub_task(task: PinnedTask, fetch: Fetch, grader: str = "") -> dict[str, bytes]:
    """Relative path -> content of the task's files, checked and patched. Raises TaskError."""
    contents = {path: fetch(f"tasks/{task.name}/{path}").read_bytes() for path in FILES}
    check(task, contents, grader)
    try:
        contents["task.toml"] = patch_task_toml(contents["task.toml"].decode()).encode()
    except ValueError as err:
        raise TaskError(f"{task.name}: task.toml can't be patched: {err}. Compare it with {__name__}.") from err
    return contents
