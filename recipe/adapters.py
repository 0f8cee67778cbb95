"""Where adapters come from: a folder, a Hub repository at a commit, and the checkpoints of a run or repository.

    python -m recipe.adapters runs/job-1/adapter                      # prints the folder after a check
    python -m recipe.adapters you/name/checkpoint-100@1a2b3c --into /tmp/a   # downloads it first, prints the folder
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recipe.checkpoints import step_and_file
from recipe.exits import EXIT_USAGE, Parser

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CHECKPOINT_FILES = (*ADAPTER_FILES, "trainer_state.json")  # the trainer writes the last one last


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


def check_adapter(folder: Path) -> Path:
    """`folder` itself. Raises AdapterError when it is not a complete adapter."""
    missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if missing:
        raise AdapterError(f"{folder} is not a complete adapter: it lacks {', '.join(missing)}")
    return folder


def fetch(text: str, into: Path) -> Path:
    """The adapter folder that `text` names; one on the Hub is downloaded below `into` first."""
    if Path(text).is_dir():
        return check_adapter(Path(text))
    from huggingface_hub import snapshot_download

    spec = Spec.parse(text)
    prefix = f"{spec.folder}/" if spec.folder else ""
    root = snapshot_download(spec.repo, revision=spec.revision, local_dir=into,
                             allow_patterns=[prefix + name for name in ADAPTER_FILES])
    return check_adapter(Path(root) / spec.folder)


class Checkpoints(Protocol):
    """A place in which complete checkpoints appear over time."""

    def steps(self) -> list[int]:
        """Optimizer steps of the complete checkpoints, ascending."""

    def get(self, step: int) -> Path:
        """Local folder of the adapter of checkpoint `step`, as last listed."""


def complete_steps(files: Iterable[str]) -> list[int]:
    """Steps of the checkpoints all of whose files are among `files` ("checkpoint-10/adapter_config.json", …)."""
    found: dict[int, set[str]] = {}
    for place in filter(None, map(step_and_file, files)):
        found.setdefault(place[0], set()).add(place[1])
    return sorted(step for step, names in found.items() if names.issuperset(CHECKPOINT_FILES))


class LocalCheckpoints:
    """The checkpoints folder of a run on this machine."""

    def __init__(self, root: Path):
        self.root = root

    def steps(self) -> list[int]:
        return complete_steps(str(p.relative_to(self.root)) for p in self.root.glob("checkpoint-*/*"))

    def get(self, step: int) -> Path:
        return check_adapter(self.root / f"checkpoint-{step}")


class HubCheckpoints:
    """The checkpoints of a Hub repository, always read at one commit: a half-pushed one is never seen."""

    def __init__(self, repo: str, into: Path):
        from huggingface_hub import HfApi

        self.api, self.repo, self.into, self.sha = HfApi(), repo, into, ""

    def steps(self) -> list[int]:
        self.sha = self.api.repo_info(self.repo).sha
        return complete_steps(self.api.list_repo_files(self.repo, revision=self.sha))

    def get(self, step: int) -> Path:
        return fetch(f"{self.repo}/checkpoint-{step}@{self.sha}", self.into / self.sha)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("adapter", help="folder, or owner/name[/checkpoint-N][@revision] on the Hub")
    parser.add_argument("--into", type=Path, default=Path("adapter-download"), help="where a download goes")
    args = parser.parse_args(argv)
    try:
        print(fetch(args.adapter, args.into).resolve())
    except (AdapterError, OSError) as err:  # huggingface_hub's errors are OSErrors
        print(f"no adapter: {err}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
