"""launch.py with the real huggingface_hub 2 against the double: what it checks, prices, uploads and starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from hub_double import HubDouble, hub_environ

from recipe.config import REPO, SettingsError

ADAPTER, CODE = "me/adapter", "me/lfm-opencode-lora-rl-code"
MODEL = "LiquidAI/LFM2.5-2.6B"
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "CACHE_DIR", "XDG_CACHE_HOME", "LAUNCHER_BASE_PYTHON", "INSTALLER")


@pytest.fixture(scope="module")
def launcher() -> str:
    """The interpreter of the launcher's own environment."""
    made = subprocess.run(["bash", "setup.sh", "--launcher"], cwd=REPO, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def scoped(*permissions: str) -> dict:
    """What whoami says of a fine-grained token with these rights in its owner's namespace."""
    return {"canReadGatedRepos": False, "global": [],
            "scoped": [{"entity": {"_id": "1", "type": "user", "name": "me"}, "permissions": list(permissions)}]}


@pytest.fixture
def world(hub: HubDouble) -> HubDouble:
    """The double with what a job reads."""
    hub.repo(MODEL).add("model", {"config.json": b"{}"})
    for split in ("train", "test"):
        pinned = json.loads((REPO / "data" / f"{split}.json").read_text())
        hub.repo(pinned["dataset"], "dataset").commits[-1].sha = pinned["revision"]
    return hub


def launch(launcher: str, hub: HubDouble, home: Path, *arguments: str, token: str | None = "hf_write",
           kind: str = "train", adapter: str = ADAPTER, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {name: os.environ[name] for name in KEPT if name in os.environ} | hub_environ(hub, home, token) | more
    return subprocess.run([launcher, "launch.py", kind, "--adapter-repo", adapter, *arguments], cwd=REPO,
                          env=environ, capture_output=True, text=True, timeout=600)


def test_without_submit_it_only_reads_and_shows_job_and_price(world, launcher, tmp_path):
    done = launch(launcher, world, tmp_path, "--env", "MAX_STEPS=20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(request.startswith("GET ") or "HEAD" in request for request in world.requests)
    for text in ('"vllm/vllm-openai:v0.31.0"', '"72h"', '"h200x2"', "[8000]", "$10.01 an hour",
                 "0.4 to 0.7 h for 20 steps", "may run jobs of me; 0 of this recipe run now", f"{MODEL} can be read",
                 "me/adapter does not exist yet; it will be made, private", "SmolDataEnvs-harbor-train@4719635",
                 "add --submit"):
        assert text in done.stdout, text
    assert "hf_write" not in done.stdout
    full = launch(launcher, world, tmp_path)
    assert "9.9 to 25.2 h for 1000 steps" in full.stdout and "at most        72 h" in full.stdout


@pytest.mark.parametrize(("kind", "flavor", "seconds", "script"), [
    ("train", "h200x2", 72 * 3600, "run_job.sh"), ("watch", "h200", 48 * 3600, "run_eval_watch.sh")])
def test_submit_uploads_the_code_and_starts_the_job(world, launcher, tmp_path, kind, flavor, seconds, script):
    world.repo(ADAPTER)
    done = launch(launcher, world, tmp_path, "--submit", "--env", "SEED=3", kind=kind)
    assert done.returncode == 0, done.stdout + done.stderr
    (number, job), = world.jobs.items()
    spec = job["spec"]
    assert spec["dockerImage"] == "vllm/vllm-openai:v0.31.0" and spec["flavor"] == flavor
    assert spec["timeoutSeconds"] == seconds
    assert spec["expose"] == {"ports": [8000], "portsPublic": [8000]}
    assert spec["environment"] == {"ADAPTER_REPO": ADAPTER, "MAX_STEPS": "1000", "SEED": "3",
                                   "SANDBOX_NAMESPACE": "me"}
    assert spec["secrets"] == {"HF_TOKEN": "hf_write"}
    assert spec["command"] == ["bash", "-c", "pip -q install huggingface_hub && "
                                             f"hf download {CODE} --local-dir /app && bash /app/{script}"]
    for text in (f"/jobs/me/{number}", f"hf jobs logs -f me/{number}", f"https://{number}--8000.hf.jobs/capture"):
        assert text in done.stdout
    assert world.repo(CODE).private
    uploaded = world.repo(CODE).files()
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    wanted = {path for path in tracked if not any(part.startswith(".") for part in path.split("/"))}
    assert wanted <= set(uploaded), wanted - set(uploaded)
    assert not [path for path in uploaded if path.startswith(("runs/", ".")) or "__pycache__" in path]


@pytest.mark.parametrize(("token", "spoil", "message"), [
    ("hf_read", lambda hub: hub.tokens.update(hf_read="read"), "the token of me can only read"),
    ("hf_unknown", lambda hub: None, "there is no valid token"),
    (None, lambda hub: None, "there is no valid token"),
    ("hf_write", lambda hub: setattr(hub, "job_rights", False), "the token may not run jobs of me (HTTP 403)"),
    ("hf_write", lambda hub: setattr(hub.repo(MODEL), "gated", True), f"https://huggingface.co/{MODEL}"),
    ("hf_write", lambda hub: hub.repos.pop(("dataset", "FineEnvs/SmolDataEnvs-harbor-test")),
     "harbor-test@b130595b579f can't"),
    ("hf_write", lambda hub: setattr(hub.repo("FineEnvs/SmolDataEnvs-harbor-train", "dataset"), "gated", True),
     "accept its conditions at https://huggingface.co/datasets/FineEnvs/SmolDataEnvs-harbor-train"),
    ("hf_write", lambda hub: setattr(hub, "rights", scoped("repo.write")), "lacks job.write of me: add them at"),
    ("hf_write", lambda hub: setattr(hub, "rights", scoped("job.write")),
     f"lacks repo.write of {CODE}, repo.write of {ADAPTER}: add them at"),
])
def test_what_would_fail_later_is_refused_now(world, launcher, tmp_path, token, spoil, message):
    spoil(world)
    done = launch(launcher, world, tmp_path, "--submit", token=token)
    assert done.returncode == 64, done.stdout + done.stderr
    assert message in done.stdout and "nothing was started" in done.stderr
    assert not world.jobs and ("model", CODE) not in world.repos


def test_a_fine_grained_token_with_all_rights_passes(world, launcher, tmp_path):
    world.rights = scoped("job.write", "repo.write")
    done = launch(launcher, world, tmp_path)
    assert done.returncode == 0 and "me, role fineGrained" in done.stdout, done.stdout


def test_a_foreign_adapter_repository_is_refused(world, launcher, tmp_path):
    done = launch(launcher, world, tmp_path, "--code-repo", CODE, adapter="other/adapter")
    assert done.returncode == 64 and "other/adapter does not exist and me cannot make it" in done.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["--env", "MAX_STEP=3"], "must be NAME=VALUE with a setting of this recipe (is MAX_STEPS meant?); "),
    (["--env", "X=3"], "must be NAME=VALUE with a setting of this recipe; "),
    (["--env", f"MODEL={REPO}/tiny/model"], "a job does not see the folders of this machine"),
    (["--env", "LORA_R=many"], "LORA_R='many': must be a whole number"),
    (["--hours", "10"], "1000 steps may take 25.2 h"),
    (["--max-price", "100"], "--max-price allows $100"),
    (["--flavor", "cpu-basic"], "must be one of h200"),
    (["--hours", "0"], "--hours 0: must be above 0"),
    (["--env", "SANDBOX=e2b"], "SANDBOX=e2b needs E2B_API_KEY"),
    (["--from-run", "/nonexistent"], "its metrics.jsonl has no steps"),
    (["--dry-run", "--submit"], "not allowed with argument"),
    (["--flavor", "h200"], "add --env GPUS=1"),
    (["--max-price", "0"], "--max-price allows $0"),
    (["--max-price", "nan"], "invalid finite value"),
    (["--hours", "nan"], "invalid finite value"),
    (["--env", "PRESET=local"], "leave it out"),
    (["--env", "ADAPTER_REPO="], "leave it out"),
])
def test_wrong_arguments_cost_no_request(hub, launcher, tmp_path, arguments, message):
    done = launch(launcher, hub, tmp_path, *arguments)
    assert done.returncode == 64 and message in done.stderr and not hub.requests


def test_one_gpu_takes_the_machine_of_half_the_price():
    from launch import parse, plan

    one, two = (plan(parse(["train", "--adapter-repo", "me/adapter", "--env", "MAX_STEPS=20", *more]))
                for more in (["--env", "GPUS=1"], []))
    assert (one.flavor, two.flavor) == ("h200", "h200x2") and two.dollars(1) - one.dollars(1) == 5
    assert "one takes longer" in one.describe() and "one takes longer" not in two.describe()
    assert plan(parse(["eval", "--adapter-repo", "me/adapter"])).flavor == "h200"


def test_an_evaluation_may_be_of_one_checkpoint():
    from launch import parse, plan

    def job(kind: str, *more: str):
        return plan(parse([kind, "--adapter-repo", "me/adapter", *more]))

    named = job("eval", "--adapter", "other/adapter/checkpoint-300@1a2b3c").arguments["command"][-1]
    assert named.endswith("bash /app/run_eval.sh --adapter other/adapter/checkpoint-300@1a2b3c")
    assert job("eval").arguments["command"][-1].endswith("bash /app/run_eval.sh")
    for kind, adapter, said in (("eval", "tests/hub", "does not see the folders"), ("eval", "adapter", "neither"),
                                ("eval", "me/a; true", "neither"), ("watch", "me/adapter", "leave it out")):
        with pytest.raises(SettingsError, match=said):
            job(kind, "--adapter", adapter)


def test_a_job_of_an_organisation_has_its_sandboxes_there_or_where_the_user_says(world, launcher, tmp_path):
    world.orgs = ["org"]
    for more, payer in (((), "org"), (("--env", "SANDBOX_NAMESPACE=me"), "me")):
        world.jobs.clear()
        done = launch(launcher, world, tmp_path, "--submit", *more, adapter="org/adapter")
        assert done.returncode == 0, done.stdout + done.stderr
        (job,) = world.jobs.values()
        assert job["owner"]["name"] == "org" and job["spec"]["environment"]["SANDBOX_NAMESPACE"] == payer
    world.rights = scoped("job.write", "repo.write")  # of the user's own
    done = launch(launcher, world, tmp_path, adapter="org/adapter")
    assert done.returncode == 64 and "lacks job.write of org, repo.write of org/lfm" in done.stdout, done.stdout
    world.rights, code = None, ("--code-repo", CODE)
    done = launch(launcher, world, tmp_path, *code, "--env", "SANDBOX_NAMESPACE=stranger")
    assert done.returncode == 64 and "the token may not run jobs of stranger (HTTP 403)" in done.stdout, done.stdout


def test_the_price_of_sandboxes_follows_the_rollouts_at_once():
    from launch import parse, plan

    def sandboxes(kind: str, **settings: int) -> float:
        pairs = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
        job = plan(parse([kind, "--adapter-repo", "me/adapter", *pairs]))
        return round(job.dollars(1) - {"h200": 5.01, "h200x2": 10.01}[job.flavor], 4)

    assert sandboxes("train", MAX_INFLIGHT=64) == 0.64 == sandboxes("train", EVAL_CONCURRENCY=64)
    assert sandboxes("eval", MAX_INFLIGHT=64, EVAL_CONCURRENCY=16) == 0.16


@pytest.mark.parametrize(("fault", "where"), [("reset", "whoami"), (500, "auth-check")])
def test_an_unreachable_hub_is_told_apart(world, launcher, tmp_path, fault, where):
    world.repo(ADAPTER)
    world.fail(1000, fault, where)
    done = launch(launcher, world, tmp_path, "--submit")
    assert done.returncode == 69 and "the Hub could not be asked" in done.stderr and not world.jobs


def test_keys_of_other_sandboxes_become_secrets_and_no_port_is_exposed(world, launcher, tmp_path):
    world.repo(ADAPTER)
    done = launch(launcher, world, tmp_path, "--submit", "--env", "SANDBOX=daytona", DAYTONA_API_KEY="dtn_1")
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = world.jobs.values()
    assert job["spec"]["secrets"] == {"HF_TOKEN": "hf_write", "DAYTONA_API_KEY": "dtn_1"}
    assert "expose" not in job["spec"] and "dtn_1" not in done.stdout and "hf.jobs" not in done.stdout


def test_a_run_of_ones_own_replaces_the_recipes_figures(world, launcher, tmp_path):
    lines = [json.dumps({"seconds": seconds}) for seconds in [20.0] * 9 + [40.0, 50.0]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    done = launch(launcher, world, tmp_path, "--from-run", str(tmp_path))
    assert "5.7 to 11.3 h for 1000 steps" in done.stdout and "20 to 40 s a step (measured in" in done.stdout


def test_the_readme_shows_the_plan_as_it_is_printed(world, launcher, tmp_path):
    done = launch(launcher, world, tmp_path, "--env", "MAX_STEPS=20", "--dry-run",
                  adapter="me/LFM2.5-2.6B-opencode-lora-RL")
    shown = re.sub(r"\bme\b", "YOU", done.stdout)
    assert f"--env MAX_STEPS=20\n{shown}```" in (REPO / "README.md").read_text(encoding="utf-8"), shown


def test_any_python_can_start_it(world, launcher, tmp_path):
    """The launcher makes and enters its environment by itself; here it exists already."""
    import sys

    done = launch(sys.executable, world, tmp_path, "--env", "MAX_STEPS=20")
    assert done.returncode == 0 and "add --submit" in done.stdout, done.stdout + done.stderr
