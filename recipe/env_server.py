"""The env server: rollouts for the trainer on a loopback port, the capture proxy alone on the public port.

    python -m recipe.env_server        # serve_env.sh calls it; settings are environment variables (recipe/config.py)

OpenEnv's Harbor server either publishes the proxy through a forwarder or mounts it beside its control plane, whose
routes ask for no key and spend the owner's sandboxes. Here the control plane (Task API, MCP, UI) listens on
127.0.0.1:ENV_PORT and the public port answers /capture and nothing else.

Needs tasks under RUN_DIR/tasks/{train,test} and a policy server at POLICY_PORT that returns token ids and processed
log-probabilities. Variables beside the settings:
    PUBLIC_URL              base URL under which sandboxes reach the public port (default by SANDBOX, see public_url)
    CAPTURE_ADMIN_KEY       opens the proxy's management routes; minted for this run when unset, and then unknown to all
    ENABLE_WEB_INTERFACE    true adds OpenEnv's web UI at /web of the control plane (slower start)
    OPENCODE_BIN            an existing OpenCode binary for local sandboxes
Exit codes: 64 wrong settings or no tasks; 69 busy port, changed seam, no sandbox, or an engine that cannot be trained
on; 130/143 ended by SIGINT/SIGTERM.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from recipe import opencode_binary, sandbox_files, sandbox_isolation, seams
from recipe.call_times import CallTimes
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser
from recipe.ports import PortBusy, bind
from recipe.serving import MOUNT, EndAbandonedRollouts, outer_app, serve

SPLITS = ("train", "test")
# What a server's first trial imports, in seconds during which nothing else would be served.
WARM_IMPORTS = ("harbor.trial.single_step", "harbor.verifier.verifier", "harbor.llms.litellm_config", "dirhash",
                "recipe.opencode_agent")


class StartError(RuntimeError):
    """The server cannot start; the message says why and what to do."""


def say(text: str) -> None:
    print(f"[env] {text}", flush=True)


def public_url(settings: Settings, environ: Mapping[str, str]) -> str:
    """Base URL of the capture proxy as a sandbox reaches it. Raises SettingsError where it cannot be derived."""
    if environ.get("PUBLIC_URL"):
        return environ["PUBLIC_URL"].rstrip("/") + MOUNT
    if settings.sandbox == "local":
        return f"http://127.0.0.1:{settings.public_port}{MOUNT}"
    if environ.get("JOB_ID"):  # set in every Hugging Face Job
        return f"https://{environ['JOB_ID']}--{settings.public_port}.hf.jobs{MOUNT}"
    raise SettingsError(f"SANDBOX={settings.sandbox} runs elsewhere and JOB_ID is not set, so this is no Hugging Face "
                        "Job: set PUBLIC_URL to the https address under which sandboxes reach port "
                        f"{settings.public_port}, or use SANDBOX=local")


def check_tasks(settings: Settings) -> None:
    """Raises SettingsError when a split has no task."""
    for split in SPLITS:
        folder = settings.run_path / "tasks" / split
        if not any(folder.glob("*/task.toml")):
            raise SettingsError(f"no tasks in {folder}: run prepare_tasks.py first (run_job.sh does)")


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
        raise StartError(f"SANDBOX={settings.sandbox} cannot be used: {status.detail}")


def sweep_sandboxes(settings: Settings) -> None:
    """Ends and removes local sandboxes of this run that outlived their rollout, or an earlier server."""
    if settings.sandbox != "local":
        return
    killed, removed = sandbox_files.sweep(settings.run_path / "sandboxes", str(settings.run_path),
                                          settings.keep_sandbox)
    if killed or removed:
        say(f"swept {killed} processes and {removed} folders of sandboxes that had not ended")


def probe_engine(settings: Settings) -> dict[str, Any]:
    """OpenEnv's live probe of the policy server. Raises StartError unless rollouts of it can be trained on."""
    from openenv.core.harness.capture.validate_llm import validate_llm

    report = validate_llm(settings.policy_url, settings.model, timeout=300)
    for finding in report.findings:
        say(f"engine: {finding}")
    say(f"engine {settings.policy_url} ({settings.model}): grade {report.rollout_type}, capture level "
        f"{report.capture_level}, log-probs {report.logprobs_mode or 'not measured'}")
    if not report.reachable or report.rollout_type != "train":
        raise StartError(
            f"the policy server at {settings.policy_url} is not graded \"train\""
            f"{'' if report.reachable else ' (it cannot be used at all)'}: start it with serve_policy.sh, that is with "
            "--return-tokens-as-token-ids --logprobs-mode processed_logprobs and the tool-call parser")
    return {"url": settings.policy_url, "model": settings.model, "ok": True, "capture_level": report.capture_level,
            "rollout_type": report.rollout_type, "reachable": True, "findings": report.findings}


def run(settings: Settings) -> int:
    """Checks everything that can be wrong, cheapest first, then serves."""
    url = public_url(settings, os.environ)
    check_tasks(settings)
    # A local sandbox reaches the public port over loopback, so nobody else has to.
    public = bind(settings.public_port, "PUBLIC_PORT", "127.0.0.1" if settings.sandbox == "local" else "0.0.0.0")
    control = bind(settings.env_port, "ENV_PORT")

    trials = settings.run_path / "trials"
    trials.mkdir(parents=True, exist_ok=True)
    # Read by OpenEnv when its modules are imported or its app is built.
    os.environ["OPENENV_HARBOR_TRIALS_DIR"] = str(trials)
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else its import waits for a download that nothing here reads
    os.environ["MAX_CONCURRENT_ENVS"] = str(settings.max_concurrent_envs)
    os.environ["OPENENV_CAPTURE_ADMIN_KEY"] = os.environ.pop("CAPTURE_ADMIN_KEY", "") or secrets.token_urlsafe(24)

    seams.check()
    calls = CallTimes()
    seams.install(settings, url, calls)
    check_sandbox(settings)
    sweep_sandboxes(settings)
    llm = probe_engine(settings)

    from openenv.harbor.serving import HarborService, build_app

    for module in WARM_IMPORTS + (("recipe.sandbox_local",) if settings.sandbox == "local" else ()):
        importlib.import_module(module)
    service = HarborService(llm_url=settings.policy_url, model=settings.model, datasets=list(SPLITS),
                            capture_port=settings.public_port, expose="direct",
                            capture_level=llm["capture_level"], max_output_tokens=settings.max_output_tokens)
    service.public_url = url
    HarborService.set_current(service)
    os.environ.pop("OPENENV_CAPTURE_ADMIN_KEY")  # kept in the service; no child process has to see it
    # A split's name is the folder it is read from, so the work folder makes "train" and "test" those names.
    os.chdir(settings.run_path / "tasks")
    app = build_app(datasets=list(SPLITS), llm_url=settings.policy_url, model=settings.model, llm=llm)
    gc.collect()
    gc.freeze()  # what is imported stays; without this every full collection walks it, with all rollouts waiting
    say(f"capture proxy on port {settings.public_port}, known to sandboxes as {url}")
    say(f"control plane on 127.0.0.1:{settings.env_port}, at most {settings.max_concurrent_envs} rollouts at once, "
        f"trials in {trials}")
    try:
        capture = outer_app(calls.around(service.capture.app))
        return asyncio.run(serve([(EndAbandonedRollouts(app), control), (capture, public)]))
    finally:
        sweep_sandboxes(settings)


def quiet_logs() -> None:
    """Warnings only: Harbor's debug log shows the commands it runs, and with them the session's key."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.WARNING)
    # One warning a rollout that OpenCode has no step limit of its own; the proxy's budget is the one we rely on.
    logging.getLogger("openenv.harbor.seams").setLevel(logging.ERROR)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.parse_args(argv)
    quiet_logs()
    try:
        return run(Settings.load())
    except SettingsError as err:
        print(f"Settings are wrong, nothing was started:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    except (PortBusy, StartError, seams.SeamError, opencode_binary.BinaryError,
            sandbox_isolation.SandboxError) as err:
        print(f"env server not started: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is stopped and swept; taking Harbor's five thousand modules apart would take seconds
