"""Proves what each process imports: one line a process, and the fix where a version is not the pinned one.

    python3 -m recipe.environments            # imports every module that the processes use: half a minute
    python3 -m recipe.environments --quick    # versions and places only

TRAINER_PYTHON and ENV_PYTHON name the interpreters (setup.sh exports them). With ENGINE=vllm the policy server runs on
the Python of the `vllm` command, and the trainer must use the torch that lies there: another one beside it would not
fit the image's CUDA, and NCCL of two versions may not speak with one another.
With ENVIRONMENTS=present other versions are named and accepted, as long as everything imports.
Standard library only. Exit codes: 0 as pinned, 69 not.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from recipe.config import REPO, Settings
from recipe.exits import EXIT_UNAVAILABLE, Parser

IMAGE = "vllm/vllm-openai:v0.31.0"
NO_PYTHON = "does not run"  # in place of a version
Facts = dict[str, Any]  # {"python", "prefix", "packages": {name: [version or None, folder]}, "failed": {module: error}}


@dataclass(frozen=True)
class Process:
    """A process of the job: its interpreter, what it must hold, and what it imports."""

    name: str
    python: str
    pins: str  # file below requirements/
    modules: tuple[str, ...]
    fix: str  # what to do where it differs
    also: tuple[str, ...] = ()  # packages whose version is shown but not pinned

    def expected(self) -> dict[str, str]:
        return read_pins(REPO / "requirements" / self.pins)


TRAINER_MODULES = ("train_lora", "eval_adapter", "export_adapter", "recipe.group_trainer", "recipe.rollout_worker",
                   "recipe.weight_sync", "recipe.checkpoint_callback", "recipe.callbacks", "recipe.harbor_sessions",
                   "recipe.isolation_check", "recipe.canary", "recipe.evaluation", "trl.experimental.async_grpo",
                   "trl.experimental.async_grpo.openenv_harness")
ENV_MODULES = ("recipe.env_server", "recipe.opencode_agent", "openenv.harbor.serving", "openenv.harbor.rollout",
               "openenv.core.harness.capture", "harbor.trial.single_step", "harbor.environments.hf_sandbox")
POLICY_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.model_executor.models.lfm2", "vllm.tool_parsers",
                  "vllm.distributed.weight_transfer.nccl_common", "recipe.vllm_weights")


def read_pins(path: Path) -> dict[str, str]:
    """{package: version} of the lines `name[extras]==version`."""
    return dict(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", path.read_text(), re.M))


def processes(settings: Settings, trainer: str, env: str) -> list[Process]:
    """The processes of a job with these settings."""
    remade = "remove that environment and start again, setup.sh makes it anew from requirements/{}"
    of_env = Process("env server", env, "env-server.in", ENV_MODULES, remade.format("env-server.txt"),
                     ("fastmcp", "mcp"))
    if settings.engine != "vllm":
        return [Process("trainer", trainer, "trainer.in", TRAINER_MODULES, remade.format("trainer.txt"), ("mcp",)),
                of_env]
    policy = Process("policy server", python_of_vllm(), "image.txt", POLICY_MODULES,
                     f"start the job with image={IMAGE}, or set ENGINE=cpu for a small model",
                     ("transformers", "mcp"))
    return [policy, Process("trainer", trainer, "trainer-job.txt", (*TRAINER_MODULES, "kernels", POLICY_MODULES[-2]),
                            remade.format("trainer-job.txt"), ("torch", "vllm")), of_env]


def python_of_vllm() -> str:
    """The interpreter that the `vllm` command names, or python3."""
    script = shutil.which("vllm")
    if script:
        with open(script, "rb") as file:
            words = file.readline()[2:].decode(errors="replace").split()
        if words and Path(words[0]).name.startswith("python"):
            return words[0]
    return shutil.which("python3") or sys.executable


def look(packages: list[str], modules: list[str]) -> Facts:
    """What this interpreter finds, and what it can't import of `modules`."""
    found, failed = {}, {}
    for module in modules:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(module)
        except BaseException as err:  # noqa: BLE001 - a module may raise anything, SystemExit too
            failed[module] = f"{type(err).__name__}: {' '.join(str(err).split())[:300]}"
    for name in packages:
        try:
            spec = importlib.util.find_spec(name.replace("-", "_"))
            found[name] = [metadata.version(name), os.path.realpath(Path(spec.origin).parent)] if spec else [None, ""]
        except metadata.PackageNotFoundError:
            found[name] = [None, ""]
    return {"python": sys.version.split()[0], "prefix": os.path.realpath(sys.prefix), "packages": found,
            "failed": failed}


def ask(process: Process, quick: bool) -> Facts:
    """`look` in the interpreter of `process`; one that does not run holds nothing."""
    names = sorted({*process.expected(), *process.also})
    code = "import json, sys; from recipe.environments import look; print(json.dumps(look(*json.loads(sys.argv[1]))))"
    try:
        # What the caller has on PYTHONPATH the processes have too (ENVIRONMENTS=present: packages in a folder).
        path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [process.python, "-c", code, json.dumps([names, [] if quick else process.modules])], cwd=REPO, text=True,
            capture_output=True, env=os.environ | {"PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"})
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, IndexError, ValueError) as err:
        said = str(err) if isinstance(err, OSError) else done.stderr.strip()[-500:]
        return {"python": NO_PYTHON, "prefix": process.python, "failed": {process.name: said},
                "packages": {name: [None, ""] for name in names}}


def describe(process: Process, facts: Facts) -> str:
    """The process's line: Python, then each package's version in the order of its pins."""
    versions = [f"{name} {facts['packages'][name][0] or 'missing'}" for name in [*process.expected(), *process.also]]
    return f"{process.name}: Python {facts['python']}, {', '.join(versions)} ({process.python})"


def public(version: str | None) -> str | None:
    """2.13.0 of 2.13.0+cpu: the same release, built for another machine."""
    return version and version.split("+")[0]


def problems(process: Process, facts: Facts, policy: Facts | None = None) -> list[str]:
    """One sentence for each thing that is not as it has to be. `policy`: the facts of the policy server's Python."""
    if facts["python"] == NO_PYTHON:
        return [f"{process.python} {NO_PYTHON}: {facts['failed'][process.name]}"]
    found = [f"{name} is {facts['packages'][name][0] or 'missing'}, expected {version}"
             for name, version in process.expected().items() if public(facts["packages"][name][0]) != version]
    found += [f"import {module} fails with {error}" for module, error in facts["failed"].items()]
    if policy is not None and policy is not facts and process.name == "trainer":
        mine, theirs = facts["packages"]["torch"], policy["packages"]["torch"]
        if mine != theirs:
            found.append(f"torch is {mine[0]} in {mine[1]}, but the image's is {theirs[0]} in {theirs[1]}: the trainer "
                         "must use the image's own")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="do not import the modules")
    parser.add_argument("--only", metavar="PROCESS", help="policy server, trainer or env server, instead of all")
    args = parser.parse_args(argv)
    settings = Settings.load()
    wanted = [process for process in processes(settings, os.environ.get("TRAINER_PYTHON", ""),
                                               os.environ.get("ENV_PYTHON", ""))
              if args.only in (None, process.name)]
    missing = [process.name for process in wanted if not process.python]
    if missing or not wanted:
        print(f'no interpreter is named for {", ".join(missing) or args.only}: eval "$(bash setup.sh)" sets '
              "TRAINER_PYTHON and ENV_PYTHON", file=sys.stderr)
        return EXIT_UNAVAILABLE
    with ThreadPoolExecutor() as pool:  # side by side: each waits for the disk
        found = list(pool.map(lambda process: ask(process, args.quick), wanted))
    policy = found[0] if wanted[0].name == "policy server" else None
    wrong = 0
    for process, facts in zip(wanted, found, strict=True):
        print(describe(process, facts))
        bad = problems(process, facts, policy)
        if settings.environments == "present" and not facts["failed"]:
            for line in bad:
                print(f"  differs: {line}")
            continue
        wrong += len(bad)
        for line in bad:
            print(f"  WRONG: {line}")
        if bad:
            print(f"  TO DO: {process.fix} ({facts['prefix']})")
    return EXIT_UNAVAILABLE if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
