"""What must hold before a job is worth its price: each check prints one line, with what to do when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe.adapters import AdapterError, Spec
from recipe.config import REPO, SettingsError

TOKENS = "https://huggingface.co/settings/tokens"


class CheckFailed(Exception):
    """The message says what is wrong and what to do."""


def check_token(api: Any, job: Any) -> str:
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        who = api.whoami()
    except (HfHubHTTPError, LocalTokenNotFoundError) as err:
        if getattr(getattr(err, "response", None), "status_code", 401) != 401:
            raise
        raise CheckFailed(f"there is no valid token: `hf auth login` with one of {TOKENS}, or set HF_TOKEN") from None
    role = who.get("auth", {}).get("accessToken", {}).get("role", "unknown")
    if role == "read":
        raise CheckFailed(f"the token of {who['name']} can only read: make one that writes to your repositories and "
                          f"runs jobs at {TOKENS}")
    missing = missing_rights(who, job)
    if missing:
        raise CheckFailed(f"the fine-grained token of {who['name']} lacks {', '.join(missing)}: add them at {TOKENS}")
    return f"{who['name']}, role {role}"


def missing_rights(who: dict[str, Any], job: Any) -> list[str]:
    """Rights that the job needs and a fine-grained token says that it has not; nothing for other tokens."""
    rights = who.get("auth", {}).get("accessToken", {}).get("fineGrained")
    if not rights:
        return []
    missing = []
    wanted = [("job.write", payer) for payer in job.payers]
    for right, where in (*wanted, ("repo.write", job.code_repo), ("repo.write", job.adapter_repo)):
        given = {p for scope in rights.get("scoped", []) for p in scope.get("permissions", [])
                 if scope.get("entity", {}).get("name") in (where.split("/")[0], where)} | set(rights.get("global", []))
        if right not in given:
            missing.append(f"{right} of {where}")
    return list(dict.fromkeys(missing))


def check_jobs(api: Any, job: Any) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    running = 0
    for payer in job.payers:
        try:
            found = api.list_jobs(namespace=payer, labels={"recipe": "lfm-opencode-lora-rl"})
            running += sum(info.status.stage == "RUNNING" for info in found)
        except HfHubHTTPError as err:
            if err.response.status_code not in (401, 402, 403):
                raise
            raise CheckFailed(f"the token may not run jobs of {payer} (HTTP {err.response.status_code}): allow it at "
                              f"{TOKENS}, and see that {payer} has a plan or credit for Jobs") from None
    return f"may run jobs of {' and '.join(job.payers)}; {running} of this recipe run now"


def check_repo(name: str) -> Callable[[Any, Any], str]:
    def check(api: Any, job: Any) -> str:
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        repo = getattr(job, name)
        try:
            api.auth_check(repo, write=True)
            return f"{repo} exists and can be written"
        except RepositoryNotFoundError:
            pass
        except HfHubHTTPError as err:
            if err.response.status_code != 403:
                raise
            raise CheckFailed(f"{repo} can't be written with this token: allow it at {TOKENS} or name another "
                              "repository") from None
        who = api.whoami()
        if repo.split("/")[0] not in {who["name"], *(org["name"] for org in who.get("orgs", []))}:
            raise CheckFailed(f"{repo} does not exist and {who['name']} cannot make it: use an owner that is yours")
        return f"{repo} does not exist yet; it will be made, private"

    return check


def check_model(api: Any, job: Any) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    model = job.settings.model
    try:
        api.hf_hub_download(model, "config.json", revision=job.settings.model_revision)
    except GatedRepoError:
        raise CheckFailed(f"{model} is gated: accept its licence at https://huggingface.co/{model} with the account of "
                          "this token") from None
    except RepositoryNotFoundError:
        raise CheckFailed(f"{model} does not exist or is not visible with this token: check MODEL") from None
    return f"{model} can be read"


def check_tasks(api: Any, job: Any) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    found = []
    for split in ("train", "test"):
        pinned = json.loads((REPO / "data" / f"{split}.json").read_text())
        name = f"{pinned['dataset']}@{pinned['revision'][:12]}"
        page = f"https://huggingface.co/datasets/{pinned['dataset']}"
        try:
            api.repo_info(pinned["dataset"], repo_type="dataset", revision=pinned["revision"])
            api.auth_check(pinned["dataset"], repo_type="dataset")  # a gated one shows itself, but not its files
        except GatedRepoError:
            raise CheckFailed(f"{name} is gated: accept its conditions at {page} with the account of this token"
                              ) from None
        except (RepositoryNotFoundError, RevisionNotFoundError) as err:
            raise CheckFailed(f"{name} can't be read ({type(err).__name__}): see {page}") from None
        found.append(name)
    return ", ".join(found)


CHECKS: tuple[tuple[str, Callable[[Any, Any], str]], ...] = (
    ("token", check_token), ("jobs", check_jobs), ("code", check_repo("code_repo")),
    ("adapter", check_repo("adapter_repo")), ("model", check_model), ("tasks", check_tasks))


def run_checks(job: Any) -> bool:
    """Runs all checks, the token's first; False when one failed. Errors of the network are the caller's."""
    from huggingface_hub import HfApi

    api, good = HfApi(), True
    for name, check in CHECKS:
        try:
            print(f"  ok    {name:8} {check(api, job)}", flush=True)
        except CheckFailed as err:
            print(f"  FAIL  {name:8} {err}", flush=True)
            good = False
            if name == "token":
                break
    return good


def adapter_of(kind: str, adapter: str | None) -> str:
    """`adapter`, which a job of `kind` is to evaluate and must be able to fetch. Raises SettingsError."""
    if not adapter:
        return ""
    if kind != "eval":
        raise SettingsError("--adapter names what `launch.py eval` evaluates: leave it out.")
    if Path(adapter).is_dir():
        raise SettingsError(f"--adapter {adapter}: a job does not see the folders of this machine: name one on the "
                            "Hub, owner/name[/checkpoint-N][@revision].")
    try:
        Spec.parse(adapter)
    except AdapterError as err:
        raise SettingsError(f"--adapter: {err}") from None
    return adapter
