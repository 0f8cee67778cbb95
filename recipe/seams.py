"""The places where OpenEnv and Harbor are extended, each checked to have the shape this recipe was written for.

    check()             # raises SeamError that names file, version and what was expected
    install(settings, url, calls)   # after check(): the OpenCode seam, the sandbox, the limits, the call times

OpenEnv has no option for these, so module globals are replaced that it looks up at call time:

    openenv/harbor/seams.py    SEAMS["opencode"]: our agent class, the session key as x-api-key, the lean settings,
                               one tool list and one model name in training and evaluation
    openenv/harbor/rollout.py  build_trial_config: the local sandbox, which Harbor knows by import path only, and ours
                               around Harbor's HF Sandbox
                               run_rollout: passes the gate first, the times of its model calls travel with its result,
                               which fails when the agent lost its model, and the agent's database does not stay on disk
    openenv/harbor/environment.py  _ROLLOUT_TIMEOUT_S: the longest rollout that the server waits for
    openenv/core/harness/capture/sessions.py  evaluation_sampling: the whole policy, as in training
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from recipe import opencode_binary, trial_files
from recipe.call_times import CAME, WENT, CallTimes
from recipe.config import Settings
from recipe.gate import Gate
from recipe.lost_model import MODEL_LOST, agent_error, answers, lost_model
from recipe.opencode_settings import LEAN_CONFIG, LEAN_ENV

VERSIONS = {"openenv": "0.10.0", "harbor": "0.25.0"}
AGENT = "recipe.opencode_agent:PinnedOpenCode"
LOCAL_SANDBOX = "recipe.sandbox_local:LocalSandbox"
HF_SANDBOX = "recipe.hf_sandbox:PinnedHFSandbox"
SETUP_TIMEOUT_S = 1800  # sandbox start, agent set-up and verifier, beside the agent's own time

TRIAL_CONFIG_PARAMETERS = ("task_dir", "harness", "sandbox", "intercept_url", "session_id", "model", "trial_name",
                           "trials_dir", "keep_sandbox", "agent_timeout_sec", "agent_step_limit", "force_build",
                           "training", "harness_profile")
SEAM_FIELDS = ("name", "dialect", "model_fmt", "import_path", "agent_env", "env", "kwargs", "training_kwargs",
               "step_limit", "status", "notes")
SERVICE_PARAMETERS = ("llm_url", "model", "datasets", "capture_port", "expose", "api_key", "auth_header", "provider",
                      "capture_level", "max_output_tokens")
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
           "repetition_penalty": 1.0}
APP_PARAMETERS = ("datasets", "llm_url", "model", "llm")


class SeamError(RuntimeError):
    """OpenEnv or Harbor has another shape than the one this recipe extends."""


def check() -> None:
    """Raises SeamError on the first seam that differs, before anything is replaced."""
    for package, expected in VERSIONS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        if found != expected:
            raise SeamError(f"{package} is {found}, expected {expected}: install requirements/env-server.txt into the "
                            "env server's Python (setup.sh does)")
    from harbor.agents.installed.opencode import OpenCode
    from harbor.environments.hf_sandbox import HFSandboxEnvironment
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig
    from openenv.core.harness.capture import CaptureServer, sessions, upstream
    from openenv.harbor import environment, rollout, seams, serving

    _same("harbor", inspect.getmodule(HFSandboxEnvironment), "HFSandboxEnvironment keeps its sandbox in _sandbox", True,
          "self._sandbox = await asyncio.to_thread(" in inspect.getsource(HFSandboxEnvironment.start))
    _same("openenv", rollout, "parameters of build_trial_config", TRIAL_CONFIG_PARAMETERS,
          _parameters(rollout.build_trial_config))
    _same("openenv", seams, "fields of Seam", SEAM_FIELDS, tuple(f.name for f in dataclasses.fields(seams.Seam)))
    _same("openenv", seams, 'the keys of SEAMS["opencode"].kwargs(...) down to the provider options',
          ("opencode_config", "provider", seams.OPENCODE_PROVIDER, "apiKey", "baseURL", "timeout"),
          _provider_shape(seams))
    _same("openenv", seams, 'model_fmt of SEAMS["opencode"]', seams.OPENCODE_PROVIDER + "/{model}",
          seams.SEAMS["opencode"].model_fmt)
    _same("openenv", serving, "parameters of HarborService", SERVICE_PARAMETERS,
          _parameters(serving.HarborService.__init__)[1:])
    _same("openenv", serving, "parameters of build_app", APP_PARAMETERS, _parameters(serving.build_app))
    _same("openenv", serving, "CaptureServer's app and registry", True,
          "app" in inspect.getsource(CaptureServer.__init__) and isinstance(CaptureServer.registry, property))
    _same("openenv", environment, "run_rollout is looked up at each rollout", True,
          "from .rollout import run_rollout as _run" in inspect.getsource(environment.HarborEnvironment._run_rollout))
    _same("openenv", rollout, "run_rollout takes trials_dir and on_session_created", True,
          {"trials_dir", "on_session_created"} <= set(_parameters(rollout.run_rollout)))
    _same("openenv", environment, "_ROLLOUT_TIMEOUT_S is seconds", True,
          isinstance(getattr(environment, "_ROLLOUT_TIMEOUT_S", None), (int, float)))
    _same("openenv", sessions, "evaluation_sampling is called by SessionRegistry.create", True,
          "evaluation_sampling(" in inspect.getsource(sessions.SessionRegistry.create))
    _same("openenv", upstream, "NON_POLICY_SAMPLING", NEUTRAL, dict(upstream.NON_POLICY_SAMPLING))
    for model, fields in ((EnvironmentConfig, {"type", "import_path", "kwargs"}),
                          (AgentConfig, {"import_path", "kwargs", "env", "override_timeout_sec"})):
        _same("harbor", inspect.getmodule(model), f"fields {sorted(fields)} of {model.__name__}", fields,
              fields & set(model.model_fields))
    _same("harbor", inspect.getmodule(OpenCode), "parameters of OpenCode.install", ("self", "environment"),
          _parameters(OpenCode.install))


def install(settings: Settings, capture_url: str, calls: CallTimes, gate: Gate | None = None) -> None:
    """Replaces the globals above for this process. `capture_url` is the capture proxy's as sandboxes know it; `calls`
    must stand in front of that proxy; `gate` lets rollouts begin."""
    from openenv.core.harness.capture import sessions
    from openenv.harbor import environment, rollout, seams

    seams.SEAMS["opencode"] = opencode_seam(seams.SEAMS["opencode"], settings)
    rollout.build_trial_config = trial_config_builder(rollout.build_trial_config, settings, capture_url)
    rollout.run_rollout = observed_rollout(rollout.run_rollout, calls, settings.keep_trials, gate,
                                           lambda: answers(settings.policy_url))
    environment._ROLLOUT_TIMEOUT_S = float(settings.agent_timeout + SETUP_TIMEOUT_S)
    sessions.evaluation_sampling = whole_policy(sessions.evaluation_sampling)


def opencode_seam(stock: Any, settings: Settings) -> Any:
    """`stock` (openenv.harbor.seams.Seam) with our agent class and settings."""
    from openenv.harbor import seams

    # The agent shows its model's name to the model. One name for base, adapter and training keeps their prompts
    # equal; the proxy replaces it with the name that the engine knows.
    shown = seams.agent_facing_model(settings.model)
    agent_kwargs: dict[str, Any] = {"version": settings.opencode_version}
    if settings.sandbox != "local":
        agent_kwargs["download"] = {"url": opencode_binary.tarball_url(settings.opencode_version),
                                    "sha512": opencode_binary.sha512_hex(settings.opencode_integrity),
                                    "member": opencode_binary.MEMBER}
    lean = {"opencode_config": LEAN_CONFIG if settings.opencode_lean else {}}

    def kwargs(base_url: str, session: str, model: str) -> dict[str, Any]:
        block = stock.kwargs(base_url, session, shown)
        # Proxies on the way may strip Authorization (the one in front of Hugging Face Jobs does); the capture
        # proxy takes the key from this header as well.
        block["opencode_config"]["provider"][seams.OPENCODE_PROVIDER]["options"]["headers"] = {"x-api-key": session}
        # OpenEnv takes delegation, questions and web fetch away in training only; an evaluation with other tools
        # than the training would measure another agent.
        for more in (stock.training_kwargs, lean):
            block = seams._deep_merge(block, more)
        return {**block, **agent_kwargs}

    return dataclasses.replace(
        stock, import_path=AGENT, kwargs=kwargs, model_fmt=f"{seams.OPENCODE_PROVIDER}/{shown}",
        agent_env={**stock.agent_env, **(LEAN_ENV if settings.opencode_lean else {})})


def whole_policy(stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`stock` (evaluation_sampling) that also pins what a training request pins and an evaluation cannot name.

    Without it vLLM fills min_p and repetition_penalty from the model's generation_config.json, in evaluation only.
    """
    from openenv.core.harness.capture.upstream import NON_POLICY_SAMPLING

    def evaluation_sampling(value: dict[str, Any] | None) -> dict[str, Any]:
        named = stock(value)
        return {**NON_POLICY_SAMPLING, **named} if named else named

    return evaluation_sampling


def trial_config_builder(stock: Callable[..., Any], settings: Settings, capture_url: str) -> Callable[..., Any]:
    """`stock` (build_trial_config) that admits the configured sandbox only and puts ours in its place."""
    ours = {"local": (LOCAL_SANDBOX, lambda: local_sandbox_kwargs(settings, capture_url)),
            "hf-sandbox": (HF_SANDBOX, dict)}

    def build_trial_config(**arguments: Any) -> Any:
        if arguments["sandbox"] != settings.sandbox:
            raise ValueError(f"this env server runs rollouts in SANDBOX={settings.sandbox}, "
                             f"not in {arguments['sandbox']}")
        if settings.sandbox not in ours:
            return stock(**arguments)
        # "docker" only gets through validation: an import path and no type is what Harbor is given.
        config = stock(**{**arguments, "sandbox": "docker"})
        path, kwargs = ours[settings.sandbox]
        environment = config.environment.model_copy(update={"type": None, "import_path": path, "kwargs": kwargs()})
        return config.model_copy(update={"environment": environment})

    return build_trial_config


def observed_rollout(stock: Callable[..., Awaitable[Any]], calls: CallTimes, keep_trials: str,
                     gate: Gate | None = None, engine_lives: Callable[[], bool] = lambda: True
                     ) -> Callable[..., Awaitable[Any]]:
    """`stock` (run_rollout) that passes `gate` first, whose result says in `phase_timings` when its first and last
    model calls were and fails when the agent lost its model, and whose trial's folder is pruned once the result is
    made, unless `keep_trials` is "full"."""

    async def run_rollout(*, on_session_created: Callable[[str], None] | None = None, **arguments: Any) -> Any:
        sessions: list[str] = []

        def created(session_id: str) -> None:
            sessions.append(session_id)
            calls.begin(session_id)
            if on_session_created is not None:
                on_session_created(session_id)

        came = time.time()
        if gate:
            await gate.passed()
        times: dict[str, float] = {}
        try:
            result = await stock(on_session_created=created, **arguments)
        finally:  # also when the rollout's client leaves
            for session_id in sessions:
                times = calls.end(session_id)
        if result.trial_name:
            trial = Path(arguments["trials_dir"]) / result.trial_name
            if why := await asyncio.to_thread(lost_model, result, times, trial, engine_lives):
                result.ok, result.error, result.exception_type = False, why, MODEL_LOST
            elif result.exception_type and (why := agent_error(trial)):
                result.error = why
            if keep_trials == "lean":
                await asyncio.to_thread(trial_files.prune, trial)
        if times:
            result.phase_timings |= times | {CAME: came, WENT: time.time()}
        return result

    return run_rollout


def local_sandbox_kwargs(settings: Settings, capture_url: str) -> dict[str, Any]:
    """Constructor arguments of recipe.sandbox_local.LocalSandbox; its only way out is the port of `capture_url`."""
    return {"root": str(settings.run_path / "sandboxes"), "run_id": str(settings.run_path),
            "runtime": settings.sandbox_runtime, "keep": settings.keep_sandbox,
            "capture_port": urlsplit(capture_url).port or settings.public_port,
            "opencode": os.environ.get("OPENCODE_BIN") or str(opencode_binary.binary_path(settings))}


def _same(package: str, module: Any, what: str, expected: Any, found: Any) -> None:
    if expected != found:
        raise SeamError(f"{package} {version(package)}, {module.__file__}: {what}: expected {expected}, found {found}. "
                        "recipe/seams.py extends this place; install the pinned versions or adapt it")


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _provider_shape(seams: Any) -> tuple[str, ...]:
    try:
        block = seams.SEAMS["opencode"].kwargs("http://url", "key", "model")
        options = block["opencode_config"]["provider"][seams.OPENCODE_PROVIDER]["options"]
    except (KeyError, TypeError) as err:
        return (repr(err),)
    return ("opencode_config", "provider", seams.OPENCODE_PROVIDER, *sorted(options))
