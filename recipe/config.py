"""Every knob of the recipe: one typed object, its environment variables, defaults, units and checks.

Shell scripts read it with ``eval "$(python3 -m recipe.config export [--local])"``; Python code with
``Settings.load()``. An environment variable always wins, then the preset (--local), then RECIPE, then the default.

    python3 -m recipe.config table            # all knobs as a Markdown table (the README's)
    python3 -m recipe.config export --local   # shell assignments of the local preset
    python3 -m recipe.config check            # one sentence per wrong value, exit code 64

Standard library only: the same file runs in the image's Python, the trainer's and the env server's.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.checks import (
    Check,
    almost,
    at_least,
    between,
    dataset_id,
    http_url,
    modules,
    no_model_folder,
    one_of,
    repo_id,
)
from recipe.exits import EXIT_USAGE, Parser

REPO = Path(__file__).resolve().parent.parent
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3")
QWEN_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class SettingsError(ValueError):
    """One or more settings are wrong; the message has one sentence per setting that says what to do."""


def knob(default: Any, env: str, help: str, unit: str = "", check: Check | None = None, local: Any = None,
         deepcoder: Any = None) -> Any:
    """A dataclass field: `local` and `deepcoder` are its values in the local preset and with RECIPE=deepcoder, None
    where those say nothing about it."""
    meta = {"env": env, "help": help, "unit": unit, "check": check, "local": local, "deepcoder": deepcoder}
    return field(default=default, metadata=meta)


def preset_value(f: dataclasses.Field[Any], preset: str, recipe: str) -> Any:
    """What a field is without an environment variable. The local preset knows the machine, so it wins."""
    asked = (("local", preset == "local"), ("deepcoder", recipe == "deepcoder"))
    return next((f.metadata[name] for name, on in asked if on and f.metadata[name] is not None), f.default)


@dataclass(frozen=True)
class Settings:
    """All settings of one run. Field order is the order of the README's table."""

    preset: str = knob("job", "PRESET", "named set of defaults", check=one_of("job", "local"), local="local")
    recipe: str = knob("smoldataenvs", "RECIPE", "family of tasks, and what goes with it: smoldataenvs asks about data "
                       "files, deepcoder are competitive-programming problems", deepcoder="deepcoder",
                       check=one_of("smoldataenvs", "deepcoder"))
    # what is trained, and for how long
    model: str = knob("LiquidAI/LFM2.5-2.6B", "MODEL", "base model: Hub id or folder", local=str(REPO / "tiny/model"),
                      deepcoder="Qwen/Qwen3-4B-Instruct-2507")
    model_revision: str = knob("main", "MODEL_REVISION", "commit or branch of a Hub model")
    adapter_repo: str = knob("", "ADAPTER_REPO", "Hub repository that receives the adapter; a Hugging Face Job must "
                             "have one", check=repo_id)
    max_steps: int = knob(1000, "MAX_STEPS", "optimizer steps; 20 is the smoke run", "steps", at_least(1), 80, 100)
    seed: int = knob(0, "SEED", "seed of task order, adapter initialisation and data generation", check=at_least(0))
    n_train_tasks: int = knob(1000, "N_TRAIN_TASKS", "training tasks", "tasks", at_least(1), 64, 64)
    n_tasks: int = knob(250, "N_TASKS", "held-out tasks of an evaluation", "tasks", at_least(1), 64, 64)
    dataset: str = knob("generated", "DATASET", "Hub dataset of RECIPE=deepcoder; generated is small problems of the "
                        "same shape that are made here", check=dataset_id, local="generated",
                        deepcoder="agentica-org/DeepCoder-Preview-Dataset")
    dataset_config: str = knob("primeintellect", "DATASET_CONFIG", "configuration of DATASET")
    dataset_revision: str = knob("main", "DATASET_REVISION", "commit or branch of DATASET")
    # LoRA
    lora: bool = knob(True, "LORA", "train an adapter; 0 trains all weights and ships a model", local=True,
                      deepcoder=False)
    lora_r: int = knob(32, "LORA_R", "LoRA rank; vLLM serves 8, 16, 32, 64, 128 and a few more",
                      check=between(1, 512, "the largest rank that vLLM serves"))
    lora_alpha: int = knob(64, "LORA_ALPHA", "LoRA alpha; the update is scaled by alpha / r", check=at_least(1))
    lora_dropout: float = knob(0.0, "LORA_DROPOUT", "dropout before A; 0 keeps sampler and trainer equal",
                               check=between(0, 0.9))
    lora_targets: tuple[str, ...] = knob(LORA_TARGETS, "LORA_TARGETS", "adapted modules, comma-separated names",
                                        check=modules(*dict.fromkeys((*LORA_TARGETS, "in_proj", *QWEN_TARGETS))),
                                        local=LORA_TARGETS, deepcoder=QWEN_TARGETS)
    lora_conv: bool = knob(False, "LORA_CONV", "adapt the projections of the short convolutions too")
    # optimisation
    learning_rate: float = knob(1e-6, "LEARNING_RATE", "constant learning rate (AdamW)", check=between(1e-9, 1),
                                local=5e-4, deepcoder=1e-5)
    num_generations: int = knob(8, "NUM_GENERATIONS", "rollouts of one GRPO group", "rollouts", at_least(2), 4)
    max_inflight: int = knob(32, "MAX_INFLIGHT", "rollouts that run at once", "rollouts", at_least(1), 4, 8)
    max_staleness: int = knob(4, "MAX_STALENESS", "oldest usable rollout", "optimizer steps", at_least(0))
    efficiency_bonus: float = knob(0.1, "EFFICIENCY_BONUS", "largest bonus of a correct answer for few tool calls; "
                                   "not in RECIPE=deepcoder", check=between(0, 1))
    train_turns: str = knob("all", "TRAIN_TURNS", "turns that carry loss: all of the agent's own, or those with a tool "
                            "call, the others staying as context", check=one_of("all", "tool-calls"),
                            deepcoder="tool-calls")
    fork_threshold: int = knob(0, "FORK_THRESHOLD", "a turn whose prompt rewrites fewer tokens of the answer before it "
                               "goes on in the same row, the rewritten ones without loss; 0 begins a new row and loses "
                               "none", "tokens", at_least(0), deepcoder=1024)
    token_budget: int = knob(0, "TOKEN_BUDGET", "tokens of one packed row; 0 counts sequences instead", "tokens",
                             at_least(0))
    per_device_batch: int = knob(1, "PER_DEVICE_BATCH", "sequences of one packed row where TOKEN_BUDGET is 0, several "
                                 "only within MAX_MODEL_LEN tokens; a step is a group either way", "sequences",
                                 at_least(1), deepcoder=4)
    zero_contrast: str = knob("train", "ZERO_CONTRAST", "groups whose rewards are all equal: train makes them a step "
                              "of zero gradient, as GRPO does, in which AdamW's momentum goes on; hold makes them a "
                              "step that moves nothing; skip gives the step to the next group",
                              check=one_of("train", "hold", "skip"), local="hold")
    ratio_stop: bool = knob(False, "RATIO_STOP", "end the run when the importance ratio of fresh rows is outside "
                            "0.998-1.002 for three steps running, instead of warning")
    dtype: str = knob("bfloat16", "DTYPE", "dtype of the base weights in trainer and engine; --local takes bfloat16 "
                      "with vLLM",
                      check=one_of("bfloat16", "float32"), local="float32")
    attention: str = knob("auto", "ATTENTION", "attention of the trainer; auto takes the first that runs here: "
                          "flash-attn3 (Hopper), varlen (Ampere and newer), sdpa-packed (anywhere)",
                          check=one_of("auto", "flash-attn3", "varlen", "sdpa-packed"))
    compile: str = knob("auto", "COMPILE", "the trainer's layers by torch.compile: auto does on a GPU; costs a minute "
                        "at the start", check=one_of("auto", "on", "off"), local="off")
    gradient_checkpointing: str = knob("auto", "GRADIENT_CHECKPOINTING", "compute activations twice instead of keeping "
                                       "them: auto for rows that would not fit into the GPU otherwise, on for all, off "
                                       "for none", check=one_of("auto", "on", "off"))
    thinking: str = knob("as-template", "THINKING", "as-template: what the chat template does, with the reasoning of "
                         "earlier turns kept; closed: an empty think block opens every turn; in trainer, server and "
                         "evaluation alike",
                         check=one_of("as-template", "closed"))
    # sampling and the agent's limits: the same in training and evaluation
    temperature: float = knob(1.0, "TEMPERATURE", "sampling temperature", check=between(0.01, 2))
    top_p: float = knob(1.0, "TOP_P", "nucleus; below 1 breaks the importance ratio", check=between(0.01, 1))
    top_k: int = knob(0, "TOP_K", "0 samples from the whole vocabulary", check=at_least(0))
    max_output_tokens: int = knob(4096, "MAX_OUTPUT_TOKENS", "cap of one model call", "tokens", at_least(1), 256,
                                  16384)
    max_model_calls: int = knob(32, "MAX_MODEL_CALLS", "model calls of one rollout", "calls", at_least(1), 6, 64)
    agent_timeout: int = knob(600, "AGENT_TIMEOUT", "time of the agent in one rollout", "s", at_least(1), 90, 180)
    # sandboxes and the agent's binary
    sandbox: str = knob("hf-sandbox", "SANDBOX", "where rollouts run",
                        check=one_of("hf-sandbox", "local", "daytona", "e2b"), local="local", deepcoder="local")
    sandbox_runtime: str = knob("auto", "SANDBOX_RUNTIME", "isolation of the local sandbox",
                                check=one_of("auto", "bwrap", "proot"))
    sandbox_flavor: str = knob("cpu-basic", "SANDBOX_FLAVOR", "machine of an HF Sandbox, a flavor of Hugging Face Jobs")
    sandbox_starts: int = knob(3, "SANDBOX_STARTS", "attempts to start the HF Sandbox of a rollout", "attempts",
                               at_least(1))
    sandbox_namespace: str = knob("", "SANDBOX_NAMESPACE", "user or organisation that HF Sandboxes are billed to; "
                                  "empty is the owner of HF_TOKEN, launch.py names that of the job")
    keep_sandbox: bool = knob(False, "KEEP_SANDBOX", "keep the folders of finished local sandboxes")
    keep_trials: str = knob("lean", "KEEP_TRIALS", "files of a finished rollout: lean is all but the agent's database, "
                            "which is over 1 MB each", check=one_of("lean", "full"))
    opencode_version: str = knob("1.18.33", "OPENCODE_VERSION", "version of the agent")
    opencode_integrity: str = knob(
        "sha512-q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==",
        "OPENCODE_INTEGRITY", "npm integrity of the agent's Linux x64 package")
    opencode_lean: bool = knob(True, "OPENCODE_LEAN", "switch off the agent's title call, updates and fetches")
    # servers
    gpus: int = knob(2, "GPUS", "1: policy server and trainer share one GPU, weights by CUDA IPC; 2: one each, weights "
                     "by NCCL", check=between(1, 2), local=1)
    engine: str = knob("vllm", "ENGINE", "policy server: vllm, cpu (small models), auto (vllm where a GPU is)",
                       check=one_of("vllm", "cpu", "auto"), local="auto")
    tool_call_parser: str = knob("lfm2", "TOOL_CALL_PARSER", "vLLM's parser of the model's tool calls",
                                 local="lfm2", deepcoder="hermes")
    public_port: int = knob(8000, "PUBLIC_PORT", "capture proxy, the only public port", check=between(1, 65535))
    route_check_every: int = knob(60, "ROUTE_CHECK_EVERY", "time between two looks whether remote sandboxes reach "
                                  "the capture proxy", "s", at_least(1))
    forwarder: str = knob("gradio", "FORWARDER", "OpenEnv's tunnel to the capture proxy for SANDBOX=daytona and e2b",
                          check=one_of("gradio", "cloudflare"))
    policy_port: int = knob(8001, "POLICY_PORT", "policy server, loopback", check=between(1, 65535))
    policy_host: str = knob("127.0.0.1", "POLICY_HOST", "bind address of the policy server; nobody else should reach "
                            "the weight routes of training mode")
    policy_address: str = knob("", "POLICY_URL", "where trainer and env server reach a policy server on another "
                               "machine; empty: 127.0.0.1 at POLICY_PORT", check=http_url)
    policy_gpu: str = knob("", "POLICY_GPU", "CUDA_VISIBLE_DEVICES of the policy server; empty leaves it as it is")
    env_port: int = knob(8002, "ENV_PORT", "env server's control plane, loopback", check=between(1, 65535))
    env_host: str = knob("127.0.0.1", "ENV_HOST", "bind address of the control plane, which starts sandboxes for "
                         "whoever reaches it")
    env_address: str = knob("", "ENV_URL", "where the trainer reaches an env server on another machine; empty: "
                            "127.0.0.1 at ENV_PORT", check=http_url)
    max_model_len: int = knob(40960, "MAX_MODEL_LEN", "context of the policy server", "tokens", at_least(64), 16384)
    gpu_memory_utilization: float = knob(0.0, "GPU_MEMORY_UTILIZATION", "vLLM's share of its GPU; 0 is 0.85 alone on "
                                         "it and 0.4 beside the trainer", check=between(0, 0.99))
    weight_sync: str = knob("auto", "WEIGHT_SYNC", "way of new weights to vLLM: auto is one flat buffer, by CUDA IPC "
                            "on one GPU and NCCL between two; stock is TRL's NCCL client",
                            check=one_of("auto", "stock"))
    weight_sync_timeout: int = knob(45, "WEIGHT_SYNC_TIMEOUT", "time of one phase of a weight sync before the run ends",
                                    "s", at_least(1))
    prefix_caching: bool = knob(False, "PREFIX_CACHING", "vLLM keeps what it computed of a conversation for its next "
                                "turn; each weight sync drops it. vLLM calls it experimental for LFM2")
    # guarding, saving, evaluating
    canary_every: int = knob(1, "CANARY_EVERY", "weight syncs between two checks that engine and trainer score a fixed "
                             "text alike", "syncs", at_least(1))
    canary_tolerance: float = knob(0.0, "CANARY_TOLERANCE", "mean difference that stops the run; 0 is 0.001 in float32 "
                                   "and 0.15 in bfloat16", "nats", at_least(0))
    save_steps: int = knob(100, "SAVE_STEPS", "checkpoint interval; 0 saves none on the way", "steps", at_least(0),
                           10, 0)
    resume: str = knob("auto", "RESUME", "auto: go on at the newest whole checkpoint in RUN_DIR or ADAPTER_REPO; "
                       "never: start anew", check=one_of("auto", "never"))
    stall_limit: int = knob(1800, "STALL_LIMIT", "time without progress before the watchdog stops the run", "s",
                            at_least(5), 600)
    eval_concurrency: int = knob(32, "EVAL_CONCURRENCY", "evaluation rollouts that run at once", "rollouts",
                                 at_least(1), 4, 8)
    k_samples: int = knob(1, "K_SAMPLES", "evaluation rollouts of each task and model; pass@1 is their mean",
                          "rollouts", at_least(1))
    eval_retries: int = knob(2, "EVAL_RETRIES", "further attempts of an ungraded cell", "attempts", at_least(0))
    eval_poll: int = knob(60, "EVAL_POLL", "time between two looks of run_eval_watch.sh for checkpoints", "s",
                          at_least(1), 5)
    eval_idle_limit: int = knob(14400, "EVAL_IDLE_LIMIT", "run_eval_watch.sh ends when no checkpoint came for so long",
                                "s", at_least(1), 900)
    trackio_project: str = knob("lfm-opencode-lora-rl", "TRACKIO_PROJECT", "trackio project", deepcoder="opencode")
    print_completions: int = knob(0, "PRINT_COMPLETIONS", "conversations of each group that go to the training log",
                                  check=at_least(0), deepcoder=2)
    trackio_space: str = knob("", "TRACKIO_SPACE", "Space that shows the trackio dashboard; empty keeps it local",
                              check=repo_id)
    # folders
    run_dir: str = knob("", "RUN_DIR", "everything one run writes; empty makes runs/<preset>-<time>")
    environments: str = knob("pinned", "ENVIRONMENTS", "pinned: set-up makes them; present: TRAINER_PYTHON, ENV_PYTHON "
                             "(or python3) and OPENCODE_BIN (or opencode) are used as they are, and what differs is "
                             "only named", check=one_of("pinned", "present"))
    cache_dir: str = knob("", "CACHE_DIR", "environments and the agent's binary, shared by runs; "
                          "empty is ~/.cache/lfm-opencode-lora-rl")

    # -- derived ---------------------------------------------------------------------------------------------
    @property
    def max_concurrent_envs(self) -> int:
        """Sessions that the env server admits: every rollout in flight and one for the client that lists tasks."""
        return max(2 * self.num_generations, self.max_inflight + 1, self.eval_concurrency + 1)

    @property
    def sandbox_idle_limit(self) -> int:
        """Seconds after which an HF Sandbox without API calls ends itself. A command that runs is no activity there,
        so this lies above the longest one, the agent's; what set-up and verifier may take comes on top."""
        return self.agent_timeout + 900

    @property
    def hub_revision(self) -> dict[str, str]:
        """The revision argument of from_pretrained, which a model in a local folder does not have."""
        return {} if Path(self.model).is_dir() else {"revision": self.model_revision}

    @property
    def engine_memory_share(self) -> float:
        """--gpu-memory-utilization: alone, the rest is for the buffer of the weight sync, NCCL and CUDA graphs; beside
        the trainer, 0.4 of an H200 is 56 GiB, 2.5 million tokens of LFM2.5-2.6B's cache, twice what 32 rollouts of
        40,960 tokens can fill. recipe/gpu_memory.py checks that the rest is enough for the trainer."""
        return self.gpu_memory_utilization or (0.4 if self.gpus == 1 else 0.85)

    @property
    def policy_url(self) -> str:
        return self.policy_address.rstrip("/") or f"http://127.0.0.1:{self.policy_port}"

    @property
    def env_url(self) -> str:
        return self.env_address.rstrip("/") or f"http://127.0.0.1:{self.env_port}"

    @property
    def run_path(self) -> Path:
        if not self.run_dir:
            raise SettingsError("RUN_DIR is not set: set it to a folder, or start through run_job.sh")
        return Path(self.run_dir).resolve()

    @property
    def final_path(self) -> Path:
        """Where training puts its result: an adapter, or with LORA=0 a model."""
        return self.run_path / ("adapter" if self.lora else "model")

    @property
    def cache_path(self) -> Path:
        root = self.cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lfm-opencode-lora-rl")
        return Path(root).expanduser().resolve()

    # -- reading ---------------------------------------------------------------------------------------------
    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, preset: str | None = None) -> Settings:
        """Settings from the environment. Raises SettingsError that lists every wrong value at once."""
        if environ is None:
            environ = os.environ
            warn_of_slips()
        preset = preset or environ.get("PRESET") or "job"
        recipe = environ.get("RECIPE") or "smoldataenvs"
        values: dict[str, Any] = {}
        errors: list[str] = []
        for f in dataclasses.fields(cls):
            default = preset_value(f, preset, recipe)
            raw = preset if f.name == "preset" else environ.get(f.metadata["env"], "")
            try:
                values[f.name] = default if raw == "" else _parse(raw, f.default)
            except ValueError as err:
                errors.append(f"{f.metadata['env']}={raw!r}: {err}")
                continue
            problem = f.metadata["check"] and f.metadata["check"](values[f.name])
            if problem:
                errors.append(f"{f.metadata['env']}={raw or default!r}: {problem}.")
        if not errors and values["engine"] == "auto":
            values["engine"] = "vllm" if vllm_runs_here(environ) else "cpu"
        if not errors and not environ.get("DTYPE"):
            values["dtype"] = cls.usual_dtype(preset, recipe, values["engine"])
        if not errors:
            errors = _check_together(cls(**values))
        if errors:
            raise SettingsError("\n".join(errors))
        return cls(**values)

    @classmethod
    def usual_dtype(cls, preset: str, recipe: str, engine: str) -> str:
        """Where DTYPE is not set: on vLLM a local run has that of a job."""
        (dtype,) = (f for f in dataclasses.fields(cls) if f.name == "dtype")
        return preset_value(dtype, "job" if engine == "vllm" else preset, recipe)

    def environ(self) -> dict[str, str]:
        """The settings as environment variables: `Settings.load(settings.environ()) == settings`."""
        return {f.metadata["env"]: _render(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@functools.cache  # once a process
def warn_of_slips() -> None:
    """Names each variable of the environment that is almost, but not, a setting: `MAX_STEP=5` would change nothing.

    No error, because other programs have variables too. Where all settings are set a script of the recipe has
    exported them, and looked before.
    """
    known = [f.metadata["env"] for f in dataclasses.fields(Settings)]
    if not all(name in os.environ for name in known):
        for name in os.environ:
            if meant := almost(name, known):
                print(f"WARN {name} is set, but no setting is called so: is {meant} meant?", file=sys.stderr)


def vllm_runs_here(environ: Mapping[str, str]) -> bool:
    """Whether this machine has a GPU and a vLLM to run on it: the `vllm` command, or a package of this Python."""
    path = environ.get("PATH")
    if not shutil.which("nvidia-smi", path=path):
        return False
    if not shutil.which("vllm", path=path) and importlib.util.find_spec("vllm") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def _parse(raw: str, like: Any) -> Any:
    if isinstance(like, bool):
        if raw.lower() not in ("0", "1", "true", "false"):
            raise ValueError("must be 0 or 1.")
        return raw.lower() in ("1", "true")
    if isinstance(like, tuple):
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if isinstance(like, (int, float)):
        try:
            value = type(like)(raw)
        except ValueError:
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"must be {'a whole number' if isinstance(like, int) else 'a number'}.")
        return value
    return raw


def _render(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _check_together(s: Settings) -> list[str]:
    errors = []
    ports = {"PUBLIC_PORT": s.public_port, "POLICY_PORT": s.policy_port, "ENV_PORT": s.env_port}
    for port in set(ports.values()):
        names = [name for name, value in ports.items() if value == port]
        if len(names) > 1:
            errors.append(f"{' and '.join(names)} are both {port}: give each server a port of its own.")
    # With a policy server elsewhere the folder may lie there, and only its name counts here.
    if not s.policy_address and (wrong := no_model_folder(s.model)):
        errors.append(wrong)
    old = s.opencode_version != Settings.opencode_version and s.opencode_integrity == Settings.opencode_integrity
    if old and s.environments == "pinned":
        errors.append(f"OPENCODE_VERSION={s.opencode_version}, but OPENCODE_INTEGRITY is the hash of "
                      f"{Settings.opencode_version}: set both, the latter to what `npm view "
                      f"opencode-linux-x64@{s.opencode_version} dist.integrity` prints.")
    if not s.lora and s.adapter_repo:
        errors.append("ADAPTER_REPO receives adapters, and LORA=0 trains all weights: unset ADAPTER_REPO or set "
                      "LORA=1.")
    if not s.lora and s.run_dir and Path(s.model).resolve() == s.final_path:
        errors.append(f"MODEL={s.model} is where LORA=0 puts its result: set RUN_DIR to another folder.")
    if s.lora and not s.lora_targets:
        errors.append("LORA_TARGETS is empty: name at least one module, for example q_proj,v_proj.")
    if s.max_output_tokens >= s.max_model_len:
        errors.append(f"MAX_OUTPUT_TOKENS={s.max_output_tokens} leaves no room for a prompt in "
                      f"MAX_MODEL_LEN={s.max_model_len}: raise the latter or lower the former.")
    if s.max_inflight < s.num_generations:
        errors.append(f"MAX_INFLIGHT={s.max_inflight} is below NUM_GENERATIONS={s.num_generations}: "
                      "a group could never be complete; set MAX_INFLIGHT to at least NUM_GENERATIONS.")
    if s.top_p < 1 or s.top_k > 0:
        errors.append("TOP_P below 1 or TOP_K above 0 truncates the distribution and breaks the importance ratio: "
                      "leave TOP_P=1 and TOP_K=0.")
    if s.gpu_memory_utilization and s.gpu_memory_utilization < 0.05:
        errors.append(f"GPU_MEMORY_UTILIZATION={s.gpu_memory_utilization:g}: must be 0 (chosen by GPUS) or at least "
                      "0.05.")
    if s.gpus == 1 and s.weight_sync == "stock" and s.engine == "vllm":
        errors.append("WEIGHT_SYNC=stock is NCCL, which cannot connect two processes on one GPU: set GPUS=2, or leave "
                      "WEIGHT_SYNC=auto, which takes CUDA IPC.")
    return errors


def markdown_table() -> str:
    """The README's table of knobs: variable, default, what the presets make of it, unit, meaning."""
    lines = ["| variable | default | `--local` | `RECIPE=deepcoder` | unit | meaning |",
             "| --- | --- | --- | --- | --- | --- |"]

    def shown(value: Any) -> str:
        text = _render(value).replace(str(REPO) + "/", "") or "(empty)"
        return f"`{text if len(text) < 72 else text[:24] + '…'}`"

    for f in dataclasses.fields(Settings):
        meta = f.metadata
        presets = ("" if meta[name] is None else shown(meta[name]) for name in ("local", "deepcoder"))
        lines.append(f"| `{meta['env']}` | {shown(f.default)} | {' | '.join(presets)} | {meta['unit']} | "
                     f"{meta['help']} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("what", choices=("export", "table", "check", "get"))
    parser.add_argument("name", nargs="?", help="with get: the variable to print")
    parser.add_argument("--local", action="store_true", help="use the local preset")
    args = parser.parse_args(argv)
    if args.what == "table":
        print(markdown_table())
        return 0
    try:
        settings = Settings.load(preset="local" if args.local else None)
    except SettingsError as err:
        print(f"Settings are wrong, nothing was started:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    if args.what == "export":
        for name, value in settings.environ().items():
            print(f"export {name}={shlex.quote(value)}")
    elif args.what == "get":
        values = settings.environ() | {"CACHE_PATH": str(settings.cache_path),
                                       "ENGINE_MEMORY_SHARE": str(settings.engine_memory_share)}
        if args.name not in values:
            print(f"no setting is called {args.name}", file=sys.stderr)
            return EXIT_USAGE
        print(values[args.name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
