"""HF Sandboxes as the Jobs that they are: whose they are, and ending those that nobody uses any more.

    python -m recipe.hf_sandbox_jobs sweep      # cancels what this run left; settings are environment variables
    python -m recipe.hf_sandbox_jobs list       # shows it only

Each sandbox carries two labels: RUN_LABEL is the run (the adapter repository, so that a run that goes on in another
Job finds its own), OWNER_LABEL the Job or machine whose env server started it. A sweep ends those of its own owner and
those whose owner has ended; a sandbox of another Job that still runs, such as the per-checkpoint evaluation of the same
adapter, is left alone, and so is one whose Job the token may not look at.
Exit codes: 0 ok, 64 wrong settings, 69 the Hub could not be asked.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from recipe import hub, sandbox_costs
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser

RUN_LABEL, OWNER_LABEL = "recipe-run", "recipe-owner"
ALIVE = ("SCHEDULING", "RUNNING")
MACHINE = "machine-"  # begins the owner of an env server that is in no Job
ATTEMPTS = 4


def labels_of(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The labels of this run's sandboxes, hashed where the Hub might not take the characters."""
    run = settings.adapter_repo or f"{socket.gethostname()}:{settings.run_path}"
    machine = MACHINE + _short(f"{socket.gethostname()}:{settings.run_path}")
    return {RUN_LABEL: _short(run), OWNER_LABEL: environ.get("JOB_ID") or machine}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def namespace_of(settings: Settings, api: Any) -> str:
    """The user or organisation that the sandboxes belong to and are billed to. Raises HubError."""
    return settings.sandbox_namespace or hub.repeat(lambda: api.whoami()["name"], "the Hub",
                                                    "asking who HF_TOKEN is of", attempts=ATTEMPTS)


def left_over(api: Any, namespace: str, labels: Mapping[str, str], adapter_repo: str = "") -> list[str]:
    """Ids of the sandboxes of this run that live although their env server has ended, or is ours. The Job of an env
    server may run under another name than its sandboxes: the adapter's owner, or the token's. Raises HubError."""
    alive = hub.repeat(lambda: list(api.list_jobs(status=list(ALIVE), labels={RUN_LABEL: labels[RUN_LABEL]},
                                                  namespace=namespace, timeout=30)),
                       namespace, "listing the sandboxes of this run", attempts=ATTEMPTS)
    ended = {labels[OWNER_LABEL]: True}

    def places() -> Iterator[str]:
        yield namespace
        yield from filter(None, [adapter_repo.partition("/")[0]])
        yield hub.repeat(lambda: api.whoami()["name"], "the Hub", "asking who HF_TOKEN is of", attempts=ATTEMPTS)

    def has_ended(owner: str) -> bool:
        if owner not in ended:
            ended[owner] = not owner.startswith(MACHINE) and _has_ended(api, owner, places())
        return ended[owner]

    return [job.id for job in alive if has_ended((job.labels or {}).get(OWNER_LABEL, MACHINE))]


def _has_ended(api: Any, job_id: str, places: Iterable[str]) -> bool:
    """Whether a Job has ended, by the first of `places` that knows it; one that none knows is gone. False where the
    token may not look."""
    hidden = False

    def stage(place: str) -> str | int:
        try:
            return api.inspect_job(job_id=job_id, namespace=place).status.stage
        except Exception as err:
            if (status := hub.status_of(err)) in (401, 403, 404):
                return status
            raise

    for place in places:
        found = hub.repeat(lambda place=place: stage(place), place, f"looking for job {job_id}", attempts=ATTEMPTS)
        if isinstance(found, str):
            return found not in ALIVE
        hidden |= found != 404
    return not hidden


def cancel(api: Any, namespace: str, job_id: str) -> None:
    """Ends one sandbox. Raises HubError."""
    hub.repeat(lambda: api.cancel_job(job_id=job_id, namespace=namespace), namespace, f"cancelling sandbox {job_id}",
               attempts=ATTEMPTS)


def sweep(api: Any, namespace: str, labels: Mapping[str, str], adapter_repo: str = "") -> list[str]:
    """Cancels what `left_over` finds and returns the ids. Raises HubError when one is left."""
    found = left_over(api, namespace, labels, adapter_repo)
    if found:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda job_id: cancel(api, namespace, job_id), found))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("what", choices=("sweep", "list"))
    args = parser.parse_args(argv)
    try:
        settings = Settings.load()
        labels = labels_of(settings, os.environ)
    except SettingsError as err:
        print(f"Settings are wrong, nothing was cancelled:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        namespace = namespace_of(settings, api)
        found = (sweep if args.what == "sweep" else left_over)(api, namespace, labels, settings.adapter_repo)
    except hub.HubError as err:
        print(f"sandboxes of this run may be left: {err}\nThey end by themselves when idle; look with\n  "
              f"hf jobs ps --label {RUN_LABEL}={labels[RUN_LABEL]}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    finally:
        if args.what == "sweep":  # an env server that was killed has not counted those that it had
            sandbox_costs.Costs(settings.run_path, settings.sandbox_flavor).ended()
    if found or args.what == "list":
        print(f"sandboxes that this run left{' are cancelled' if args.what == 'sweep' else ''}: "
              f"{', '.join(found) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
