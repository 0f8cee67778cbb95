"""The env server: rollouts for the trainer on a loopback port, the capture proxy alone on the public port.

    python -m recipe.env_server        # serve_env.sh calls it; settings are environment variables (recipe/config.py)

OpenEnv's Harbor server either publishes the proxy through a forwarder or mounts it beside its control plane, whose
routes ask for no key and spend the owner's sandboxes. Here the control plane (Task API, MCP, UI) listens on
ENV_HOST:ENV_PORT, by default on loopback, and the public port answers /capture and nothing else.

With remote sandboxes the server asks its own public URL before it says that it is healthy, and goes on asking: a lost
route stops new rollouts (recipe/route.py). HF Sandboxes reach it through the
proxy of the Job that it runs in, Daytona's and E2B's through one of OpenEnv's forwarders.

Needs tasks under RUN_DIR/tasks/{train,test} and a policy server at POLICY_PORT that returns token ids and processed
log-probabilities. Variables beside the settings:
    PUBLIC_URL              base URL under which sandboxes reach the public port (default by SANDBOX, see public_url)
    CAPTURE_ADMIN_KEY       opens the proxy's management routes; minted for this run when unset, and then unknown to all
    ENABLE_WEB_INTERFACE    true adds OpenEnv's web UI at /web of the control plane (slower start)
    OPENCODE_BIN            an existing OpenCode binary for local sandboxes
Exit codes: 64 wrong settings, no key or no tasks; 69 busy port, changed seam, no sandbox, no route from the public URL,
or an engine that cannot be trained on; 130/143 ended by SIGINT/SIGTERM.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import secrets
import sys
from typing import Any

from recipe import opencode_binary, sandbox_costs, sandbox_isolation, sandbox_keys, seams
from recipe.call_times import CallTimes
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser
from recipe.gate import Gate
from recipe.ports import PortBusy, bind, is_loopback
from recipe.route import RouteCheck, RouteLost
from recipe.sandbox_setup import (
    SPLITS,
    StartError,
    check_sandbox,
    check_tasks,
    open_forwarder,
    public_url,
    say,
    sweep_sandboxes,
    use_hf_sandboxes,
)
from recipe.serving import MOUNT, EndAbandonedRollouts, outer_app, serve

# What a server's first trial imports, in seconds during which nothing else would be served.
WARM_IMPORTS = ("harbor.trial.single_step", "harbor.verifier.verifier", "harbor.llms.litellm_config", "dirhash",
                "recipe.opencode_agent")


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
    sandbox_keys.check(settings.sandbox, os.environ)
    check_tasks(settings)
    remote = settings.sandbox != "local"
    # A local sandbox reaches the public port over loopback, as a forwarder does; a Job's proxy does not.
    public = bind(settings.public_port, "PUBLIC_PORT", "0.0.0.0" if settings.sandbox == "hf-sandbox" else "127.0.0.1")
    control = bind(settings.env_port, "ENV_PORT", settings.env_host)
    if not is_loopback(settings.env_host):
        say(f"WARNING: ENV_HOST={settings.env_host} lets other machines in, and the control plane asks for no key: "
            "whoever reaches it starts sandboxes at your cost. Use a private network")

    trials = settings.run_path / "trials"
    trials.mkdir(parents=True, exist_ok=True)
    # Read by OpenEnv when its modules are imported or its app is built.
    os.environ["OPENENV_HARBOR_TRIALS_DIR"] = str(trials)
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else its import waits for a download that nothing here reads
    os.environ["MAX_CONCURRENT_ENVS"] = str(settings.max_concurrent_envs)
    os.environ["OPENENV_CAPTURE_ADMIN_KEY"] = os.environ.pop("CAPTURE_ADMIN_KEY", "") or secrets.token_urlsafe(24)

    seams.check()
    check_sandbox(settings)
    forwarder, gate, fleet = None, Gate(settings.run_path), None
    if settings.sandbox == "hf-sandbox":
        fleet = use_hf_sandboxes(settings, gate)
    sweep_sandboxes(settings, fleet)
    llm = probe_engine(settings)
    if not url:
        forwarder, url = open_forwarder(settings)
    calls, route = CallTimes(), RouteCheck(url, gate, settings.route_check_every) if remote else None
    seams.install(settings, url, calls, gate)

    from openenv.harbor.serving import HarborService, build_app

    for module in WARM_IMPORTS + (() if remote else ("recipe.sandbox_local",)):
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
    say(f"control plane on {settings.env_host}:{settings.env_port}, at most {settings.max_concurrent_envs} rollouts "
        f"at once, trials in {trials}")
    capture = outer_app(calls.around(service.capture.app), *([route.route(MOUNT)] if route else []))

    async def first() -> None:
        say(f"route: {await route.first()}")

    limit, threads = settings.stall_limit + settings.agent_timeout, 2 * settings.max_concurrent_envs + 8
    served = serve((capture, public), (EndAbandonedRollouts(app), control), threads=threads,
                   first=first if route else None, watch=(lambda: route.watch(limit)) if route else None)
    try:
        return asyncio.run(served)
    finally:
        if forwarder:
            forwarder.stop()
        sweep_sandboxes(settings, fleet)
        if fleet:
            fleet.costs.ended()
        if fleet and (totals := sandbox_costs.read(settings.run_path)):
            say(sandbox_costs.line(totals))


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
    except RouteLost as err:
        print(f"env server ended: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except (PortBusy, StartError, seams.SeamError, opencode_binary.BinaryError,
            sandbox_isolation.SandboxError) as err:
        print(f"env server not started: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is stopped and swept; taking Harbor's five thousand modules apart would take seconds
