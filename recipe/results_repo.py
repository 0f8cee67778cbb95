"""RUN_DIR/eval and its copy under eval/ of the adapter repository: pushed as results appear, fetched by a new start.

    ADAPTER_REPO=you/name python -m recipe.results_repo                                  # may results be pushed there?
    RUN_DIR=runs/a ADAPTER_REPO=you/name python -m recipe.results_repo --push watch      # pushes RUN_DIR/eval

A push runs in a thread of its own and is repeated while its error may pass, so an evaluation never waits for the Hub
and a finished cell never depends on it. Every push is one commit of the files that have changed. cells.jsonl and
protocols.json carry the name of the evaluation there (watch_cells.jsonl), because a repository holds those of several.

Exit codes: 0 ok, or no ADAPTER_REPO · 64 the Hub refuses · 69 the Hub can't be reached.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from recipe import hub
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_TERMINATED, EXIT_UNAVAILABLE, EXIT_USAGE, Parser
from recipe.watchdog import write_atomic

PLACE = "eval"
CELLS, PROTOCOLS = "cells.jsonl", "protocols.json"
OF_CHECKPOINT = re.compile(r"checkpoint-(\d+)_results\.json")
PUSH_EVERY = 600  # seconds between two pushes of cells while an evaluation runs: what a lost machine may cost


class ResultsRepo:
    """The copy of `folder` in `repo` (owner/name) for the evaluation called `name`. An empty `repo` does nothing."""

    def __init__(self, repo: str, folder: Path, name: str):
        self.repo, self.folder, self.name = repo, folder, name
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="results-push")
        self._running: Future[None] | None = None
        self._asked: str | None = None  # message of the next commit
        self._there: dict[str, bytes] = {}  # file -> content of the last push
        self._last = time.monotonic()

    def check(self) -> None:
        """Makes the repository when there is none and proves that it can be written. Raises HubError."""
        if not self.repo:
            return
        from huggingface_hub import HfApi

        def prepare() -> None:
            HfApi().create_repo(self.repo, exist_ok=True, private=True)
            HfApi().auth_check(self.repo, write=True)

        hub.repeat(prepare, self.repo, f"opening {self.repo}")

    def restore(self) -> int:
        """Fetches the cells, protocols and checkpoints' results of an earlier start that are not here; the number of
        cells that came. Raises HubError: to begin anew would pay for them again and overwrite them there."""
        if not self.repo:
            return 0
        for name, content in hub.repeat(self._fetch, self.repo, f"fetching {PLACE}/ of {self.repo}").items():
            file = self.folder / name
            if name == PROTOCOLS and file.exists():
                write_atomic(file, json.dumps(json.loads(content) | json.loads(file.read_text()), indent=1,
                                              sort_keys=True) + "\n")
            elif name != CELLS and not file.exists():
                write_atomic(file, content)
        return self._new_cells

    def _fetch(self) -> dict[str, str]:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError

        self._new_cells = 0
        try:
            sha = HfApi().repo_info(self.repo).sha
        except RepositoryNotFoundError:
            return {}
        wanted = [f"{PLACE}/{self._remote(CELLS)}", f"{PLACE}/{self._remote(PROTOCOLS)}",
                  f"{PLACE}/checkpoint-*_results.json"]
        root = Path(snapshot_download(self.repo, revision=sha, allow_patterns=wanted,
                                      local_dir=self.folder / ".restored")) / PLACE
        local = {self._remote(name): name for name in (CELLS, PROTOCOLS)}
        found = {local.get(file.name, file.name): file.read_text() for file in sorted(root.glob("*"))
                 if file.name in local or OF_CHECKPOINT.fullmatch(file.name)}
        if CELLS in found:
            self._new_cells = self._add_cells(found[CELLS])
        return found

    def _add_cells(self, text: str) -> int:
        """Puts the cells that are not here before those that are: the later line of a cell counts."""
        file = self.folder / CELLS
        here = file.read_text() if file.exists() else ""
        known = set(here.splitlines())
        new = [line for line in text.splitlines() if line.strip() and line not in known]
        if new:
            write_atomic(file, "\n".join(new) + "\n" + here)
        return len(new)

    def push(self, message: str) -> None:
        """Asks for a commit of what has changed; returns at once."""
        self._last = time.monotonic()
        if not self.repo:
            return
        self._asked = message
        if self._running is None or self._running.done():
            self._warn()
            self._running = self._pool.submit(self._push)

    def push_sometimes(self) -> None:
        """`push` when the last one was PUSH_EVERY seconds ago."""
        if time.monotonic() - self._last > PUSH_EVERY:
            self.push(f"Evaluation under way: {self.name}")

    def finish(self) -> None:
        """Waits for what was asked, and tries once more what failed. Raises HubError when it is not on the Hub."""
        if self._running is None:
            return
        self._running.exception()
        if self._warn() or self._asked:
            self._asked = self._asked or f"Evaluation: {self.name}"
            self._running = self._pool.submit(self._push)
        error = self._running.exception()
        self._pool.shutdown()
        if error:
            raise hub.HubError(f"{error}\n{self.by_hand()}") from error

    def by_hand(self) -> str:
        return (f"The results are kept in {self.folder}; push them with:\n  RUN_DIR="
                f"{shlex.quote(str(self.folder.parent))} ADAPTER_REPO={self.repo} \"$TRAINER_PYTHON\" -m "
                f"recipe.results_repo --push {self.name}")

    def last_push(self, message: str) -> None:
        """Pushes what is there before an evaluation ends early: its machine may be gone afterwards."""
        self.push(message)
        try:
            self.finish()
        except hub.HubError as err:
            print(err, file=sys.stderr)

    def push_on_sigterm(self) -> None:
        """SIGTERM pushes what is there before it ends the process."""
        def stop(*_: Any) -> NoReturn:
            print("SIGTERM: finished cells are pushed, then the evaluation ends.", flush=True)
            try:
                with hub.pushing(self.folder.parent, self.by_hand()):
                    self.push("Evaluation stopped")
                    self.finish()
            except hub.HubError as err:
                print(err, file=sys.stderr, flush=True)
            os._exit(EXIT_TERMINATED)  # rollouts under way are given up

        if self.repo:
            signal.signal(signal.SIGTERM, stop)

    def _warn(self) -> bool:
        """Says why the last push failed; whether it did."""
        error = self._running.exception() if self._running else None
        if error:
            print(f"WARN results were not pushed; they are kept and pushed with the next ones. {error}", flush=True)
        return error is not None

    def _push(self) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        while self._asked:
            message, self._asked = self._asked, None
            # Contents, not paths: a file that grows while it is uploaded would not be what its hash says.
            files = {self._remote(file.name): file.read_bytes() for file in sorted(self.folder.iterdir())
                     if file.is_file() and not file.name.startswith(".")}
            changed = {name: content for name, content in files.items() if self._there.get(name) != content}
            if not changed:
                continue

            def commit(changed: dict[str, bytes] = changed, message: str = message) -> Any:
                operations = [CommitOperationAdd(f"{PLACE}/{name}", content) for name, content in changed.items()]
                return HfApi().create_commit(self.repo, operations, commit_message=message)

            made = hub.repeat(commit, self.repo, f"pushing results to {self.repo}")
            self._there |= changed
            print(f"results pushed to {self.repo}/{PLACE} ({made.oid[:8]})", flush=True)

    def _remote(self, name: str) -> str:
        return f"{self.name}_{name}" if name in (CELLS, PROTOCOLS) else name


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--push", metavar="NAME", help="push RUN_DIR/eval as that of the evaluation called NAME")
    args = parser.parse_args(argv)
    try:
        settings = Settings.load()
        repo = settings.adapter_repo
        if not args.push:
            ResultsRepo(repo, Path(), "").check()
            return 0
        results = ResultsRepo(repo, settings.run_path / PLACE, args.push)
        results.push(f"Evaluation: {args.push}")
        results.finish()
    except SettingsError as err:
        print(err, file=sys.stderr)
        return EXIT_USAGE
    except hub.HubError as err:
        print(f"results can't be pushed to ADAPTER_REPO={repo}: {err}", file=sys.stderr)
        return EXIT_USAGE if err.refused else EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
