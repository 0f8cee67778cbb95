"""Checkpoints to and from the adapter repository on the Hub: one commit each, complete or absent.

    checkpoint-N/   everything in the checkpoint's manifest, and the manifest, in one commit
    /               adapter and tokenizer of the newest checkpoint, in the same commit

`CheckpointPusher` uploads in a thread of its own, so that a training step never waits for the network, and repeats what
may pass (429, 5xx, resets, 412). `fetch_newest` reads the repository at one commit and takes the newest checkpoint
whose files are all there; a download counts only when every SHA-256 is that of the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from recipe import disk
from recipe.checkpoints import MANIFEST, damage, read_manifest, size_damage, step_and_file, step_of
from recipe.watchdog import write_atomic

ROOT_FILES = ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
              "chat_template.jinja", "special_tokens_map.json")
PASSING = {408, 409, 412, 425, 429, 500, 502, 503, 504}  # HTTP statuses that another attempt may not meet
LASTING = {errno.ENOENT, errno.EACCES}  # of this machine's disk, beside a full one
MAX_FAILED = 3  # checkpoints in a row whose push failed: the run ends
ATTEMPTS, FIRST_WAIT, LONGEST_WAIT = 7, 5.0, 120.0  # of one push, in all about 5 minutes of waiting
LONGEST_ASKED = 900.0  # that the Hub is obeyed
PUSHING = "pushing"  # in the run folder
Result = TypeVar("Result")


class HubError(RuntimeError):
    """The Hub refused or could not be reached. `final`: another attempt would fail too; `refused`: the Hub said so."""

    def __init__(self, message: str, final: bool = False, refused: bool = False):
        super().__init__(message)
        self.final, self.refused = final, refused


def status_of(err: BaseException) -> int | None:
    """HTTP status of an error of huggingface_hub; None when there was no answer."""
    return getattr(getattr(err, "response", None), "status_code", None)


def explain(err: BaseException, repo: str) -> str:
    """One sentence on what happened and, where it is known, what to do."""
    what = " ".join(str(err).split())[:300] or type(err).__name__
    advice = {
        401: "HF_TOKEN is missing or not valid: set a token of https://huggingface.co/settings/tokens.",
        403: f"HF_TOKEN may not write to {repo}: give it write permission for {repo.split('/')[0]} at "
             "https://huggingface.co/settings/tokens.",
        404: f"{repo} does not exist or HF_TOKEN may not see it: check its name.",
        412: f"Something else writes to {repo} at the same time: two runs must not share a repository.",
        429: "The Hub limits this account's requests; it is asked again when it says.",
    }.get(status_of(err) or 0, "")
    if (status_of(err) or 0) >= 500:
        advice = "The Hub has an outage, see https://status.huggingface.co."
    if disk.is_full(err):
        advice = "The disk is full: free some of it, or set RUN_DIR and HF_HOME to a larger one."
    if type(err).__name__ == "GatedRepoError":
        advice = f"Accept the conditions of {repo} on its page, with the account of HF_TOKEN."
    return f"{type(err).__name__}: {what}" + (f" {advice}" if advice else "")


def repeat(call: Callable[[], Result], repo: str, what: str, stop: threading.Event | None = None,
           attempts: int | None = None) -> Result:
    """`call()`, again after a pause while its error may pass. Raises HubError when it does not, or `stop` is set."""
    stop = stop or threading.Event()
    attempts = attempts or ATTEMPTS
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except Exception as err:  # hf_xet raises plain RuntimeErrors, httpx its own
            status = status_of(err)
            lasting = getattr(err, "errno", None) in LASTING or disk.is_full(err)
            if (status is not None and status not in PASSING) or lasting:
                raise HubError(f"{what}: {explain(err, repo)}", final=True, refused=status is not None) from err
            if attempt == attempts or stop.is_set():
                raise HubError(f"{what}: still failing after {attempt} attempts. {explain(err, repo)}") from err
            asked = getattr(getattr(err, "response", None), "headers", {}).get("Retry-After", "")
            wait = (min(LONGEST_ASKED, float(asked)) if asked.isdigit() else
                    min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1)))
            print(f"{what}: attempt {attempt} of {attempts} failed, the next follows in {wait:g} s. "
                  f"{explain(err, repo)}", flush=True)
            stop.wait(wait)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def pushing(run: Path, text: str) -> Iterator[None]:
    """While this lasts, all that is left to do is a push, or the last save: RUN_DIR/pushing has `text`, what is missing
    until it ends and how to go on. recipe/job.sh gives it time then, ends the servers meanwhile, and shows the file
    when that was too little."""
    file = run / PUSHING
    with contextlib.suppress(OSError):  # a full disk must not cost the push
        write_atomic(file, text)
    try:
        yield
    except HubError as err:
        with contextlib.suppress(OSError):
            write_atomic(file, str(err))
        raise
    file.unlink(missing_ok=True)


class CheckpointPusher:
    """Pushes sealed checkpoints one after the other, in order, in a thread of its own."""

    def __init__(self, repo: str):
        from huggingface_hub import HfApi

        self.api, self.repo = HfApi(), repo
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="hub-push")
        self.stop = threading.Event()
        self.running: dict[Path, Future[None]] = {}
        self.failed: dict[Path, str] = {}
        self.in_a_row = 0
        self.newest = 0  # step of the newest checkpoint that reached the Hub

    def open(self) -> set[int]:
        """Makes the repository when there is none and proves that it can be written; the steps that it holds."""
        def prepare() -> set[int]:
            self.api.create_repo(self.repo, exist_ok=True, private=True)
            self.api.auth_check(self.repo, write=True)
            return set(remote_checkpoints(self.api, self.repo, "main"))

        steps = repeat(prepare, self.repo, f"opening {self.repo}")
        self.newest = max(steps, default=0)
        return steps

    def push(self, folder: Path) -> None:
        """Queues the checkpoint, and once more those that failed before."""
        self._collect()
        self._queue(*sorted(self.failed, key=step_of), folder)

    def check(self) -> None:
        """Raises HubError when pushing has failed for good; costs nothing otherwise."""
        self._collect()
        if self.in_a_row >= MAX_FAILED:
            raise HubError("Checkpoints can't be pushed, and a run that can't save is stopped.\n" + self.report())

    def finish(self) -> None:
        """Waits for what is queued and tries what failed once more. Raises HubError when something is left."""
        self._wait()
        self._queue(*sorted(self.failed, key=step_of))
        self._wait()
        self.pool.shutdown()
        if self.failed:
            raise HubError(self.report())

    def abandon(self) -> None:
        """Ends the thread soon: no further attempts, nothing more from the queue."""
        self.stop.set()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def report(self) -> str:
        """What is not on the Hub, and the commands that push it."""
        lines = []
        for folder, reason in [*self.failed.items(), *((folder, "still on its way") for folder in self.running)]:
            lines += [f"{folder.name} is not on the Hub ({reason}). It is kept; push it with:",
                      f"  hf upload {self.repo} {shlex.quote(str(folder))} {folder.name}"]
        return "\n".join(lines)

    def _queue(self, *folders: Path) -> None:
        for folder in folders:
            self.failed.pop(folder, None)
            self.running[folder] = self.pool.submit(self._push, folder)

    def _wait(self) -> None:
        for future in [*self.running.values()]:
            future.exception()
        self._collect()

    def _collect(self) -> None:
        for folder, future in [*self.running.items()]:
            if not future.done():
                continue
            del self.running[folder]
            error = future.exception()
            if error is None:
                self.in_a_row = 0
                continue
            self.failed[folder] = str(error)
            self.in_a_row += MAX_FAILED if getattr(error, "final", False) else 1
            print(f"WARN {folder.name} was not pushed; it is kept and tried again later. {error}", flush=True)

    def _push(self, folder: Path) -> None:
        from huggingface_hub import CommitOperationAdd

        step, names = step_of(folder), [*read_manifest(folder)["files"], MANIFEST]

        def commit() -> Any:
            # Operations carry upload state: each attempt needs its own.
            operations = [CommitOperationAdd(f"{folder.name}/{name}", folder / name) for name in names]
            if step >= self.newest:
                operations += [CommitOperationAdd(name, folder / name) for name in names if name in ROOT_FILES]
            return self.api.create_commit(self.repo, operations, commit_message=folder.name)

        made = repeat(commit, self.repo, f"pushing {folder.name}", self.stop)
        self.newest = max(self.newest, step)
        print(f"{folder.name} pushed to {self.repo} ({made.oid[:8]})", flush=True)


def remote_checkpoints(api: Any, repo: str, revision: str) -> dict[int, dict[str, int]]:
    """Step -> {file: size} of the checkpoints of a repository that have a manifest."""
    return {step: files for step, files in remote_files(api, repo, revision).items() if MANIFEST in files}


def remote_files(api: Any, repo: str, revision: str) -> dict[int, dict[str, int]]:
    """Step -> {file: size} of everything that lies in a checkpoint's folder."""
    from huggingface_hub.hf_api import RepoFile

    found: dict[int, dict[str, int]] = {}
    for entry in api.list_repo_tree(repo, recursive=True, revision=revision):
        place = step_and_file(entry.path)
        if place and isinstance(entry, RepoFile):
            found.setdefault(place[0], {})[place[1]] = entry.size
    return found


def remote_manifest(repo: str, sha: str, step: int, into: Path) -> dict[str, Any]:
    """The manifest of a checkpoint at commit `sha`, downloaded below `into`."""
    from huggingface_hub import hf_hub_download

    return json.loads(Path(hf_hub_download(repo, f"checkpoint-{step}/{MANIFEST}", revision=sha, local_dir=into))
                      .read_text())


def fetch_newest(repo: str, root: Path, above: int = 0, broken: dict[str, str] | None = None) -> Path | None:
    """Downloads the newest whole checkpoint with more than `above` steps to root/checkpoint-N, or returns None.

    Notes in `broken` what is wrong with each that was passed over. Raises HubError when the Hub can't be asked: a run
    that began anew then would overwrite what is there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()

    def look() -> tuple[str, dict[int, dict[str, int]]]:
        try:
            sha = api.repo_info(repo).sha
        except RepositoryNotFoundError:
            return "", {}
        return sha, remote_checkpoints(api, repo, sha)

    sha, found = repeat(look, repo, f"looking for checkpoints in {repo}")
    for step in sorted((s for s in found if s > above), reverse=True):
        wrong = repeat(lambda step=step: _download(repo, sha, step, found[step], root), repo,
                       f"downloading checkpoint-{step}")
        shutil.rmtree(root / f".checkpoint-{step}.part", ignore_errors=True)
        if wrong is None:
            return root / f"checkpoint-{step}"
        print(f"WARN checkpoint-{step} in {repo} is passed over: {wrong}", flush=True)
        if broken is not None:
            broken[f"checkpoint-{step} in {repo}"] = wrong
    return None


def _download(repo: str, sha: str, step: int, sizes: dict[str, int], root: Path) -> str | None:
    """Puts a checkpoint in its place atomically; returns what is wrong with it, or None."""
    from huggingface_hub import snapshot_download

    name = f"checkpoint-{step}"
    part = root / f".{name}.part"
    manifest = remote_manifest(repo, sha, step, part)
    if wrong := size_damage(manifest, sizes):
        return wrong
    snapshot_download(repo, revision=sha, local_dir=part,
                      allow_patterns=[f"{name}/{file}" for file in manifest["files"]])
    wrong = damage(part / name)
    if wrong is None:
        shutil.rmtree(root / name, ignore_errors=True)
        (part / name).rename(root / name)
    return wrong
