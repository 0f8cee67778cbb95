"""Where rollouts run and how they reach the capture proxy: what the env server checks and prepares for each SANDBOX."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from typing import Any

from recipe import hf_sandbox_jobs, opencode_binary, sandbox_costs, sandbox_files, sandbox_isolation
from recipe.config import Settings, SettingsError
from recipe.gate import Gate
from recipe.serving import MOUNT

SPLITS = ("train", "test")
FORWARDED = ("daytona", "e2b")  # reach the capture proxy through OpenEnv's forwarders


class StartError(RuntimeError):
    """The server cannot start; the message says why and what to do."""


def say(text: str) -> None:
    print(f"[env] {text}", flush=True)


def public_url(settings: Settings, environ: Mapping[str, str]) -> str:
    """Base URL of the capture proxy as a sandbox reaches it; "" where a forwarder will say it. Raises SettingsError."""
    if environ.get("PUBLIC_URL"):
        return environ["PUBLIC_URL"].rstrip("/") + MOUNT
    if settings.sandbox == "local":
        return f"http://127.0.0.1:{settings.public_port}{MOUNT}"
    if settings.sandbox in FORWARDED:
        return ""
    if environ.get("JOB_ID"):  # set in every Hugging Face Job
        return f"https://{environ['JOB_ID']}--{settings.public_port}.hf.jobs{MOUNT}"
    raise SettingsError(f"SANDBOX={settings.sandbox} runs elsewhere and JOB_ID is not set, so this is no Hugging Face "
                        "Job: set PUBLIC_URL to the https address under which sandboxes reach port "
                        f"{settings.public_port}, or use SANDBOX=local")


def open_forwarder(settings: Settings) -> tuple[Any, str]:
    """(OpenEnv's forwarder, URL of the capture proxy behind it). Raises StartError."""
    from openenv.core.harness.capture.forwarding import ForwardingError, make_forwarder

    forwarder = make_forwarder(settings.forwarder)
    try:
        forwarder.preflight()
        return forwarder, forwarder.start(settings.public_port).rstrip("/") + MOUNT
    except ForwardingError as err:
        raise StartError(f"FORWARDER={settings.forwarder} cannot publish the capture proxy to SANDBOX="
                         f"{settings.sandbox}: {err}. Try the other FORWARDER, or set PUBLIC_URL to an address of your "
                         f"own that leads to port {settings.public_port}") from err


def check_tasks(settings: Settings) -> None:
    """Raises SettingsError when a split has no task, or a task cannot run in the configured sandbox."""
    for split in SPLITS:
        folder = settings.run_path / "tasks" / split
        files = sorted(folder.glob("*/task.toml"))
        if not files:
            raise SettingsError(f"no tasks in {folder}: run prepare_tasks.py first (run_job.sh does)")
        if settings.sandbox != "hf-sandbox":
            continue
        for file in files:
            if not tomllib.loads(file.read_text(encoding="utf-8")).get("environment", {}).get("docker_image"):
                raise SettingsError(f"{file} has no [environment] docker_image, and an HF Sandbox builds no image: run "
                                    "prepare_tasks.py (it sets the recipe's image), or name an image in your own task")


def check_sandbox(settings: Settings) -> None:
    """Says what isolates rollouts here; raises StartError when the configured sandbox cannot work."""
    if settings.sandbox == "local":
        if not os.environ.get("OPENCODE_BIN"):
            os.environ["OPENCODE_BIN"] = str(opencode_binary.ensure_binary(settings))
        say(f"local sandbox: {sandbox_isolation.detect(settings.sandbox_runtime).describe()}")
        return
    from openenv.harbor.capabilities import check_sandbox as ask

    status = ask(settings.sandbox)
    if not status.available:
        raise StartError(f"SANDBOX={settings.sandbox} cannot be used: {status.detail} (setup.sh installs the SDK of "
                         "the SANDBOX that it is told; an ENV_PYTHON made for another one lacks it)")


def use_hf_sandboxes(settings: Settings, gate: Gate) -> Any:
    """The fleet that the rollouts' HF Sandboxes belong to. Raises StartError when the token is refused."""
    from huggingface_hub import HfApi

    from recipe import hf_sandbox, hub

    api = HfApi()
    try:  # once: the client would ask before each sandbox otherwise
        namespace = hf_sandbox_jobs.namespace_of(settings, api)
    except hub.HubError as err:
        raise StartError(f"SANDBOX=hf-sandbox cannot be used: {err}") from err
    costs = sandbox_costs.Costs(settings.run_path, settings.sandbox_flavor)
    # Of an earlier server here that was killed with all around it; none is left, and nobody knows since when.
    costs.ended(longest=settings.sandbox_idle_limit)
    fleet = hf_sandbox.Fleet(
        api, namespace, hf_sandbox_jobs.labels_of(settings, os.environ), settings.sandbox_flavor,
        settings.sandbox_idle_limit, settings.sandbox_starts, gate, costs)
    hf_sandbox.use(fleet)
    say(f"HF Sandboxes of {namespace} on {settings.sandbox_flavor}, labelled {fleet.labels}; each ends by itself after "
        f"{settings.sandbox_idle_limit} s without a call")
    return fleet


def sweep_sandboxes(settings: Settings, fleet: Any = None) -> None:
    """Ends and removes sandboxes of this run that outlived their rollout, or an earlier server."""
    if fleet is not None:
        try:
            if found := hf_sandbox_jobs.sweep(fleet.api, fleet.namespace, fleet.labels, settings.adapter_repo):
                say(f"sandboxes that had not ended are cancelled: {', '.join(found)}")
        except hf_sandbox_jobs.hub.HubError as err:
            say(f"WARN sandboxes of this run may be left; they end by themselves when idle. {err}")
        return
    if settings.sandbox != "local":
        return
    killed, removed = sandbox_files.sweep(settings.run_path / "sandboxes", str(settings.run_path),
                                          settings.keep_sandbox)
    if killed or removed:
        say(f"swept {killed} processes and {removed} folders of sandboxes that had not ended")
