#!/usr/bin/env python3
"""Checks, prices and starts a Hugging Face Job of this recipe. Without --submit nothing is started or changed.

    python3 launch.py train --adapter-repo you/LFM2.5-2.6B-opencode-lora-RL --env MAX_STEPS=20      # the plan only
    python3 launch.py train --adapter-repo you/LFM2.5-2.6B-opencode-lora-RL --submit                # upload and start
    python3 launch.py train --adapter-repo you/… --env GPUS=1                # both on one GPU, half the price
    python3 launch.py watch --adapter-repo you/LFM2.5-2.6B-opencode-lora-RL --submit                # learning curve
    python3 launch.py eval  --adapter-repo you/LFM2.5-2.6B-opencode-lora-RL --submit                # final comparison
    python3 launch.py eval  --adapter-repo you/… --adapter you/…/checkpoint-300@1a2b3c        # of one checkpoint

It needs a token that may write to your repositories and run jobs (`hf auth login` or HF_TOKEN), and huggingface_hub 2,
which the recipe's other environments cannot have: it makes an environment of its own on its first run. With
--env SANDBOX=daytona or e2b, their key is taken from the environment and becomes a secret of the job.
Exit codes: 0 planned or started; 64 wrong arguments, or a check failed and nothing was started; 69 the Hub can't be
reached, or no environment could be made.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from recipe import json_lines, sandbox_costs, sandbox_keys
from recipe.checks import almost
from recipe.config import REPO, Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser
from recipe.launch_checks import adapter_of

IMAGE = "vllm/vllm-openai:v0.31.0"
LABEL = {"recipe": "lfm-opencode-lora-rl"}
LEFT_OUT = ["runs/*", ".*", "*/.*", "*__pycache__*"]  # of the code bundle, beside what Git ignores as such
# Dollars an hour: https://huggingface.co/docs/hub/jobs-pricing
PRICES = {"h200": 5.0, "h200x2": 10.0, "h200x4": 20.0, "h200x8": 40.0}
EXPOSED_PORT = 0.01  # dollars an hour, all exposed ports of one job
# Seconds a step on h200x2, estimated: once the queue of rollouts is full, and in the first steps. 20 steps take 40 min.
FAST_STEP, SLOW_STEP, SET_UP = 35, 90, 600


@dataclass(frozen=True)
class Kind:
    script: str
    flavor: str
    hours: int  # time limit; a Job's own default of 30 minutes would cut everything off


KINDS = {"train": Kind("run_job.sh", "h200x2", 72), "watch": Kind("run_eval_watch.sh", "h200", 48),
         "eval": Kind("run_eval.sh", "h200", 48)}


@dataclass(frozen=True)
class Job:
    """Everything that run_job() is told, the token apart."""

    kind: str
    code_repo: str
    flavor: str
    hours: float
    env: dict[str, str]
    settings: Settings
    step_seconds: tuple[float, float] = (FAST_STEP, SLOW_STEP)
    measured: str = ""  # the run folder that step_seconds comes from
    adapter: str = ""  # what is evaluated, where it is not the adapter of adapter_repo

    @property
    def adapter_repo(self) -> str:
        return self.settings.adapter_repo

    @property
    def owner(self) -> str:
        """The user or organisation that the job runs under."""
        return self.code_repo.split("/")[0]

    @property
    def payers(self) -> list[str]:
        """Those under whom Jobs are started: this one and, where they have another owner, its sandboxes."""
        sandboxes = [self.settings.sandbox_namespace] if self.settings.sandbox == "hf-sandbox" else []
        return list(dict.fromkeys([self.owner, *filter(None, sandboxes)]))

    @property
    def arguments(self) -> dict:
        fetch = f"hf download {self.code_repo} --local-dir /app"
        script = KINDS[self.kind].script + (f" --adapter {shlex.quote(self.adapter)}" if self.adapter else "")
        return dict(
            image=IMAGE, flavor=self.flavor, timeout=f"{self.hours:g}h", env=self.env,
            labels=LABEL | {"kind": self.kind},
            command=["bash", "-c", f"pip -q install huggingface_hub && {fetch} && bash /app/{script}"],
            # Sandboxes of other providers come back through a forwarder of their own.
            **({"expose_public": [self.settings.public_port]} if self.settings.sandbox == "hf-sandbox" else {}))

    @property
    def secrets(self) -> list[str]:
        """Names of the job's secrets."""
        return ["HF_TOKEN"] + ([sandbox_keys.KEYS[self.settings.sandbox][0]] if self.forwarded else [])

    @property
    def forwarded(self) -> bool:
        return self.settings.sandbox not in ("hf-sandbox", "local")

    @property
    def estimate(self) -> tuple[float, float] | None:
        """Hours of training, (few, many), at step_seconds; None for jobs that have no such figure."""
        if self.kind != "train":
            return None
        return tuple((SET_UP + step * self.settings.max_steps) / 3600 for step in self.step_seconds)

    def dollars(self, hours: float) -> float:
        s = self.settings
        at_once = max(s.max_inflight, s.eval_concurrency) if self.kind == "train" else s.eval_concurrency
        sandboxes = at_once * sandbox_costs.PRICES.get(s.sandbox_flavor, 0.0) if s.sandbox == "hf-sandbox" else 0.0
        return hours * (PRICES[self.flavor] + EXPOSED_PORT + sandboxes)

    def describe(self) -> str:
        spec = self.arguments | {"secrets": {name: "(not shown)" for name in self.secrets}}
        lines = [f"{name:14} {json.dumps(value)}" for name, value in spec.items()]
        lines.append(f"price          ${PRICES[self.flavor] + EXPOSED_PORT:.2f} an hour for {self.flavor}, and up to "
                     f"${self.dollars(1) - PRICES[self.flavor] - EXPOSED_PORT:.2f} for sandboxes")
        if self.estimate:
            few, many = self.estimate
            source = f"measured in {self.measured}" if self.measured else "an estimate; --from-run takes yours"
            lines.append(f"expected       {few:.1f} to {many:.1f} h for {self.settings.max_steps} steps and set-up, "
                         f"${self.dollars(few):.0f} to ${self.dollars(many):.0f}; the final evaluation comes on top")
            lines.append(f"               {self.step_seconds[0]:.0f} to {self.step_seconds[1]:.0f} s a step ({source})")
            if self.settings.gpus == 1:
                lines.append("               steps as timed on h200x2: where the GPU is the limit, one takes longer")
        lines.append(f"at most        {self.hours:g} h, ${self.dollars(self.hours):.0f}: the time limit ends the job")
        return "\n".join(lines)


def seconds_of(run: Path) -> tuple[float, float]:
    """Seconds a step of a run of one's own: median, and the 90th percentile. Raises SettingsError."""
    try:
        steps = sorted(step["seconds"] for step in json_lines.read(run / "metrics.jsonl"))
        return steps[len(steps) // 2], steps[len(steps) * 9 // 10]
    except (OSError, KeyError, IndexError):
        raise SettingsError(f"--from-run {run}: its metrics.jsonl has no steps: name the folder of a run that "
                            "was trained on the machine of this job.") from None


def plan(args: argparse.Namespace) -> Job:
    """The job that the arguments ask for. Raises SettingsError on values that the job would refuse."""
    kind = KINDS[args.kind]
    env = {"ADAPTER_REPO": args.adapter_repo}
    for pair in args.env:
        if pair.partition("=")[0] in ("ADAPTER_REPO", "PRESET"):
            raise SettingsError(f"--env {pair}: a job has --adapter-repo and the job preset; leave it out.")
        name, equals, value = pair.partition("=")
        known = Settings().environ()
        if not equals or name not in known:
            meant = almost(name, known)
            raise SettingsError(f"--env {pair}: must be NAME=VALUE with a setting of this recipe"
                                f"{f' (is {meant} meant?)' if meant else ''}; `python3 -m recipe.config table` lists "
                                "them.")
        env[name] = value
    env.setdefault("MAX_STEPS", "1000")
    code = args.code_repo or f"{args.adapter_repo.split('/')[0]}/lfm-opencode-lora-rl-code"
    if env.get("SANDBOX", "hf-sandbox") == "hf-sandbox":  # else they would be the token's owner's, also under an org
        env.setdefault("SANDBOX_NAMESPACE", code.split("/")[0])
    settings = Settings.load(env, preset="job")
    if Path(settings.model).is_dir():
        raise SettingsError(f"MODEL={settings.model}: a job does not see the folders of this machine: name a Hub id.")
    one_gpu = args.kind == "train" and settings.gpus == 1
    flavor = args.flavor or ("h200" if one_gpu else kind.flavor)
    hours = kind.hours if args.hours is None else args.hours
    if flavor not in PRICES:
        raise SettingsError(f"--flavor {flavor}: must be one of {', '.join(PRICES)}; the recipe needs their memory.")
    if args.kind == "train" and settings.gpus == 2 and flavor == "h200":
        raise SettingsError("--flavor h200 has one GPU: add --env GPUS=1, with which policy server and trainer share "
                            "it, or take h200x2.")
    if hours <= 0:
        raise SettingsError(f"--hours {hours:g}: must be above 0; without a time limit of its own a job ends after 30 "
                            "minutes.")
    if settings.sandbox != "hf-sandbox":  # whose key is the token, looked at later
        sandbox_keys.check(settings.sandbox, os.environ)
    job = Job(args.kind, code, flavor, hours, env, settings,
              *((seconds_of(args.from_run), str(args.from_run)) if args.from_run else ()),
              adapter=adapter_of(args.kind, args.adapter))
    if job.estimate and job.estimate[1] > hours:
        raise SettingsError(f"{settings.max_steps} steps may take {job.estimate[1]:.1f} h, the job would end after "
                            f"{hours:g} h: raise --hours or lower MAX_STEPS.")
    if args.max_price is not None and job.dollars(hours) > args.max_price:
        raise SettingsError(f"The job can cost ${job.dollars(hours):.0f}, --max-price allows ${args.max_price:.0f}: "
                            "lower --hours or raise --max-price.")
    return job


def submit(job: Job) -> None:
    """Uploads the code and starts the job."""
    from huggingface_hub import HfApi, get_token

    api = HfApi()
    api.create_repo(job.code_repo, private=True, exist_ok=True)
    api.upload_folder(repo_id=job.code_repo, folder_path=REPO, ignore_patterns=[*LEFT_OUT],
                      commit_message="Code of the recipe")
    print(f"code uploaded to https://huggingface.co/{job.code_repo}")
    secrets = {name: get_token() if name == "HF_TOKEN" else os.environ[name] for name in job.secrets}
    info = api.run_job(**job.arguments, secrets=secrets, namespace=job.owner)
    print(f"started        {info.url}\nlog            hf jobs logs -f {job.owner}/{info.id}\n"
          f"stop           hf jobs cancel {job.owner}/{info.id}")
    if not job.forwarded:
        print(f"capture proxy  https://{info.id}--{job.settings.public_port}.hf.jobs/capture")


def finite(text: str) -> float:
    """A number that can be compared: nan would pass every check of a price."""
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("kind", choices=KINDS, help="training, per-checkpoint evaluation, final evaluation")
    parser.add_argument("--adapter-repo", required=True, metavar="OWNER/NAME", help="receives or holds the adapter")
    parser.add_argument("--adapter", metavar="OWNER/NAME[/checkpoint-N][@REVISION]",
                        help="what eval evaluates (default: the adapter of --adapter-repo)")
    parser.add_argument("--code-repo", metavar="OWNER/NAME", help="receives this code (default: …-code of that owner)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a setting, repeatable")
    parser.add_argument("--flavor", help="machine (default: h200x2 to train, h200 with "
                        "--env GPUS=1 and to evaluate)")
    parser.add_argument("--hours", type=finite, help="time limit (default: 72 to train, 48 to evaluate)")
    parser.add_argument("--max-price", type=finite, metavar="DOLLARS", help="refuse a job that could cost more")
    parser.add_argument("--from-run", type=Path, metavar="RUN_DIR", help="estimate from the steps of this finished run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="check and show, start nothing (the default)")
    what.add_argument("--submit", action="store_true", help="upload the code and start the job")
    return parser.parse_args(argv)


def has_run_job() -> bool:
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    import huggingface_hub

    return int(huggingface_hub.__version__.split(".")[0]) >= 2


def with_own_environment(argv: list[str]) -> int:
    """Runs this script again in the launcher's environment, which is made first."""
    made = subprocess.run(["bash", str(REPO / "setup.sh"), "--launcher"], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        return made.returncode
    environ = os.environ | {"LAUNCHER_READY": "1"}
    return subprocess.run([made.stdout.strip(), str(REPO / "launch.py"), *argv], env=environ).returncode


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        job = plan(args)
    except SettingsError as err:
        print(f"nothing was started:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    if not has_run_job():
        if os.environ.get("LAUNCHER_READY"):
            print("the launcher's environment has no huggingface_hub 2: remove it and run again", file=sys.stderr)
            return EXIT_UNAVAILABLE
        return with_own_environment(argv)
    from huggingface_hub.errors import HTTPError

    from recipe.launch_checks import run_checks

    print(job.describe(), flush=True)
    try:
        if not run_checks(job):
            print("\nnothing was started: a check above failed", file=sys.stderr)
            return EXIT_USAGE
        if args.submit:
            submit(job)
        else:
            print("\nnothing was started; add --submit to upload the code and start this job")
    except (OSError, HTTPError) as err:
        print(f"the Hub could not be asked: {type(err).__name__}: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
