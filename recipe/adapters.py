"""Where adapters come from: a folder, a Hub repository at a commit, and the checkpoints of a run or repository.

    python -m recipe.adapters runs/job-1/adapter
    python -m recipe.adapters you/name/checkpoint-100@1a2b3c --into /tmp/a   # downloads it first

Prints three lines: the adapter's folder, where it comes from, and the name of its results files.
Exit codes: 0 ok · 64 what was named is no adapter, or may not be read · 69 the Hub can't be reached.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recipe import checkpoints, digests, hub
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
FINAL = "final_results"  # name of the results files of an adapter at the root of its repository


class AdapterError(ValueError):
    """What was named is no complete adapter; the message says what is missing."""


@dataclass(frozen=True)
class Spec:
    """A Hub adapter: owner/name[/folder][@revision]."""

    repo: str
    folder: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> Spec:
        match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w./-]+))?(?:@([\w./-]+))?", text)
        if not match:
            raise AdapterError(f"{text!r} is neither a folder nor owner/name[/checkpoint-N][@revision]")
        return cls(match[1], match[2] or "", match[3])


@dataclass(frozen=True)
class Adapter:
    """An adapter on this machine: its folder, where it comes from, and the name of its results files."""

    folder: Path
    source: str
    results: str = FINAL


def check_adapter(folder: Path) -> Path:
    """`folder` itself. Raises AdapterError when it is not a complete adapter, or not the one its manifest names."""
    missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if missing:
        raise AdapterError(f"{folder} is not a complete adapter: it lacks {', '.join(missing)}")
    if (folder / checkpoints.MANIFEST).exists() and (wrong := checkpoints.damage(folder, ADAPTER_FILES)):
        raise AdapterError(f"{folder} is not a complete adapter: {wrong}")
    return folder


def adapter_digest(adapter: Path) -> str:
    """Names the weights and the configuration of an adapter folder."""
    return digests.of_files(adapter / name for name in ADAPTER_FILES)


def check_model(folder: Path) -> Path:
    """`folder` itself. Raises AdapterError when it is no model (LORA=0)."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise AdapterError(f"{folder} is not a complete model: it lacks config.json or *.safetensors")
    return folder


def model_digest(folder: Path) -> str:
    """Names the weights and the configuration of a model folder."""
    return digests.of_hashes({file.name: checkpoints.file_record(file)["sha256"] for file in
                              sorted([folder / "config.json", *folder.glob("*.safetensors")])})


def manifest_digest(manifest: Mapping[str, Any]) -> str | None:
    """The `adapter_digest` of a checkpoint by its manifest alone; None when that lists no adapter."""
    files = manifest["files"]
    return digests.of_hashes({name: files[name]["sha256"] for name in ADAPTER_FILES}) if files.keys() >= {
        *ADAPTER_FILES} else None


def fetch(text: str, into: Path) -> Adapter:
    """The adapter that `text` names; one on the Hub is downloaded below `into` first, at one commit.

    Raises AdapterError for what is no adapter, HubError when the Hub refuses or can't be reached.
    """
    if Path(text).is_dir():
        folder = check_adapter(Path(text)).resolve()
        return Adapter(folder, str(folder), f"{folder.name}_{FINAL}" if checkpoints.NAME.fullmatch(folder.name)
                       else FINAL)
    from huggingface_hub import HfApi

    spec = Spec.parse(text)
    sha = hub.repeat(lambda: HfApi().repo_info(spec.repo, revision=spec.revision).sha, spec.repo, f"looking at {text}")
    names = [spec.folder.replace("/", "-")] if spec.folder else []
    names += [sha[:8]] if spec.revision else []
    source = f"{spec.repo}{'/' * bool(spec.folder)}{spec.folder}@{sha}"
    return Adapter(download(spec.repo, spec.folder, sha, into).resolve(), source, "_".join([*names, FINAL]))


def download(repo: str, folder: str, sha: str, into: Path) -> Path:
    """The adapter in `folder` of the repository at commit `sha`, downloaded below `into` and compared with its
    manifest where it has one."""
    from huggingface_hub import snapshot_download

    prefix = f"{folder}/" if folder else ""
    root = hub.repeat(lambda: snapshot_download(
        repo, revision=sha, local_dir=into / sha[:12],
        allow_patterns=[prefix + name for name in (*ADAPTER_FILES, checkpoints.MANIFEST)]),
        repo, f"downloading {prefix}{ADAPTER_FILES[1]} of {repo}")
    return check_adapter(Path(root) / folder)


class Checkpoints(Protocol):
    """A place in which checkpoints appear over time. `incomplete` is what is wrong with those that are not whole."""

    incomplete: dict[int, str]

    def look(self) -> dict[int, str]:
        """Optimizer step -> adapter_digest of each whole checkpoint, as its manifest says. Raises HubError."""

    def get(self, step: int) -> Adapter:
        """The adapter of checkpoint `step`, as last looked at. Raises AdapterError or HubError."""


class LocalCheckpoints:
    """The checkpoints folder of a run on this machine."""

    def __init__(self, root: Path):
        self.root, self.incomplete = root, {}
        self._known: dict[tuple[int, int], str | None] = {}  # (step, time of its manifest) -> damage

    def look(self) -> dict[int, str]:
        found, self.incomplete = {}, {}
        for folder in self.root.glob("checkpoint-*"):
            if not checkpoints.NAME.fullmatch(folder.name):
                continue
            step, manifest = checkpoints.step_of(folder), checkpoints.read_manifest(folder)
            wrong = "it was not written to its end" if manifest is None else self._damage(step, folder)
            if wrong is None and (digest := manifest_digest(manifest)):
                found[step] = digest
            else:
                self.incomplete[step] = wrong or "its manifest lists no adapter"
        return dict(sorted(found.items()))

    def _damage(self, step: int, folder: Path) -> str | None:
        key = step, (folder / checkpoints.MANIFEST).stat().st_mtime_ns  # it is written last: once whole, whole
        if key not in self._known:
            self._known[key] = checkpoints.damage(folder)
        return self._known[key]

    def get(self, step: int) -> Adapter:
        folder = check_adapter(self.root / f"checkpoint-{step}").resolve()
        return Adapter(folder, str(folder))


class HubCheckpoints:
    """The checkpoints of a Hub repository, always read at one commit: a half-pushed one is never taken for whole.

    Whole means that all files of the manifest are in that commit with their sizes; the adapter's SHA-256 are compared
    when it is downloaded. A repository that does not exist yet has no checkpoints.
    """

    def __init__(self, repo: str, into: Path):
        from huggingface_hub import HfApi

        self.api, self.repo, self.into, self.sha = HfApi(), repo, into, ""
        self.incomplete: dict[int, str] = {}
        self._found: dict[int, str] = {}

    def look(self) -> dict[int, str]:
        sha = hub.repeat(self._newest, self.repo, f"looking for checkpoints in {self.repo}")
        if sha != self.sha:
            found, incomplete = hub.repeat(lambda: self._list(sha), self.repo, f"listing {self.repo}@{sha[:8]}")
            self.sha, self._found, self.incomplete = sha, found, incomplete
        return dict(self._found)

    def _newest(self) -> str:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return self.api.repo_info(self.repo).sha
        except RepositoryNotFoundError:
            return ""

    def _list(self, sha: str) -> tuple[dict[int, str], dict[int, str]]:
        found: dict[int, str] = {}
        incomplete: dict[int, str] = {}
        for step, sizes in sorted((hub.remote_files(self.api, self.repo, sha) if sha else {}).items()):
            if checkpoints.MANIFEST not in sizes:
                incomplete[step] = "its manifest is not there"
                continue
            try:
                manifest = hub.remote_manifest(self.repo, sha, step, self.into / sha[:12])
            except json.JSONDecodeError:
                incomplete[step] = "its manifest can't be read"
                continue
            wrong = checkpoints.size_damage(manifest, sizes)
            if wrong is None and (digest := manifest_digest(manifest)):
                found[step] = digest
            else:
                incomplete[step] = wrong or "its manifest lists no adapter"
        return found, incomplete

    def get(self, step: int) -> Adapter:
        name = f"checkpoint-{step}"
        try:
            folder = download(self.repo, name, self.sha, self.into)
        except AdapterError as err:  # until a later commit mends it
            self.incomplete[step] = str(err)
            self._found.pop(step, None)
            raise
        return Adapter(folder.resolve(), f"{self.repo}/{name}@{self.sha}")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("adapter", help="folder, or owner/name[/checkpoint-N][@revision] on the Hub")
    parser.add_argument("--into", type=Path, default=Path("adapter-download"), help="where a download goes")
    args = parser.parse_args(argv)
    try:
        found = fetch(args.adapter, args.into)
    except AdapterError as err:
        print(f"no adapter: {err}", file=sys.stderr)
        return EXIT_USAGE
    except hub.HubError as err:
        print(f"the adapter can't be fetched: {err}", file=sys.stderr)
        return EXIT_USAGE if err.refused else EXIT_UNAVAILABLE
    print(found.folder, found.source, found.results, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
