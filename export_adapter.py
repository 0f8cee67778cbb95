#!/usr/bin/env python3
"""Publishes a checkpoint: adapter files and a model card, as a folder or to the Hub; optionally the merged model too.

    RUN_DIR=runs/job-1 python export_adapter.py --local-dir out            # the newest whole checkpoint of the run
    python export_adapter.py --checkpoint runs/job-1/checkpoints/checkpoint-300 --local-dir out
    python export_adapter.py --checkpoint you/name/checkpoint-300@1a2b3c --local-dir out
    ... --merged                   also writes out/merged: base + adapter in one bf16 model, log-probs compared
    ... --push you/name            uploads the folder to the Hub repository; a new one is private (needs HF_TOKEN)

Without --push nothing but a Hub checkpoint needs a network. A checkpoint counts as whole by its manifest.json, whose
settings are the card's. The card's figures come from a results file that evaluated these very weights (--results;
default: the best one in the eval/ of the run or repository), are compared with its cells, and are checked again before
a push; without one the card says that the adapter was not evaluated. When a push fails, the same command goes on.
Exit codes: 0 ok · 64 wrong settings, incomplete checkpoint or foreign results · 69 the Hub failed or refused.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from recipe import checkpoints, hub
from recipe.adapters import ADAPTER_FILES, AdapterError, Spec, adapter_digest, check_adapter, manifest_digest
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser, missing_package

MARK = "export.json"  # written last: the folder is a finished export of these weights


@dataclass(frozen=True)
class Source:
    """A whole checkpoint on this machine, and the folder of the results files that may be about it."""

    folder: Path
    results: Path


def find_source(settings: Settings, named: str | None, into: Path) -> Source:
    """The checkpoint that `named` means; None is the newest whole one of RUN_DIR. Raises AdapterError, HubError."""
    if named is None:
        newest = checkpoints.newest_checkpoint(settings.run_path / "checkpoints")
        if newest is None:
            raise AdapterError(f"{settings.run_path / 'checkpoints'} holds no whole checkpoint: set RUN_DIR to a run "
                               "folder, or name one with --checkpoint")
        return Source(newest, settings.run_path / "eval")
    if not Path(named).is_dir():
        return download(Spec.parse(named), into)
    folder = Path(named).resolve()
    if not (folder / checkpoints.MANIFEST).exists():
        folder = sealed_twin(folder)
    if wrong := checkpoints.damage(folder):
        raise AdapterError(f"{folder} is not a whole checkpoint: {wrong}")
    return Source(folder, folder.parent.parent / "eval")


def sealed_twin(adapter: Path) -> Path:
    """The checkpoint with the weights of RUN_DIR/adapter, which has no manifest. Raises AdapterError without one."""
    if all((adapter / name).is_file() for name in ADAPTER_FILES):
        digest = adapter_digest(adapter)
        for folder in sorted((adapter.parent / "checkpoints").glob("checkpoint-*")):
            manifest = checkpoints.read_manifest(folder)
            if manifest and manifest_digest(manifest) == digest:
                return folder
    raise AdapterError(f"{adapter} is no whole checkpoint: it has no {checkpoints.MANIFEST}, which is written last. "
                       "Name a folder such as RUN_DIR/checkpoints/checkpoint-300")


def download(spec: Spec, into: Path) -> Source:
    """The checkpoint of a Hub repository without its optimizer, and the repository's newest results."""
    from huggingface_hub import HfApi, snapshot_download

    if not checkpoints.NAME.fullmatch(spec.folder):
        raise AdapterError(f"{spec.repo} alone names no checkpoint: name one, for example {spec.repo}/checkpoint-300")
    names = (*ADAPTER_FILES, *hub.ROOT_FILES, checkpoints.MANIFEST, checkpoints.SETTINGS)

    def fetch(revision: str | None, patterns: list[str], root: Path) -> Path:
        sha = HfApi().repo_info(spec.repo, revision=revision).sha
        return Path(snapshot_download(spec.repo, revision=sha, local_dir=root, allow_patterns=patterns))

    folder = hub.repeat(lambda: fetch(spec.revision, [f"{spec.folder}/{name}" for name in names], into / "checkpoint"),
                        spec.repo, f"downloading {spec.folder} of {spec.repo}") / spec.folder
    here = [name for name in (checkpoints.read_manifest(folder) or {"files": {}})["files"] if name in names]
    if wrong := checkpoints.damage(folder, {*here, *ADAPTER_FILES, checkpoints.SETTINGS}):
        raise AdapterError(f"{spec.folder} of {spec.repo} is not a whole checkpoint: {wrong}")
    results = hub.repeat(lambda: fetch(None, ["eval/*.json", "eval/*cells.jsonl"], into / "results"),
                         spec.repo, f"downloading the results of {spec.repo}")
    return Source(folder, results / "eval")


def export(source: Source, results: Path | None, out: Path, repo: str = "") -> Path:
    """Writes adapter, tokenizer, card, results and curve to `out`, which must be empty or absent."""
    from recipe import card_results, model_card, plots

    adapter = check_adapter(source.folder)
    file = results or card_results.choose(source.results, adapter)
    result = card_results.load(file, adapter) if file else None
    step = checkpoints.read_manifest(adapter)["step"]
    curve = card_results.curve(source.results, adapter, step)
    if out.exists() and any(out.iterdir()):
        raise AdapterError(f"{out} is not empty: name a new folder, so that nothing old is published")
    (out / "eval").mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys((*ADAPTER_FILES, *hub.ROOT_FILES)):
        if (adapter / name).exists():
            shutil.copyfile(adapter / name, out / name)
    if file:
        shutil.copyfile(file, out / "eval" / file.name)
    if curve:
        plots.learning_curve(curve, out / model_card.CURVE)
        shutil.copyfile(source.results / "summary.json", out / "eval" / "summary.json")
    facts = model_card.Facts(
        step=step, training=json.loads((adapter / checkpoints.SETTINGS).read_text()),
        config=json.loads((adapter / "adapter_config.json").read_text()), repo=repo, result=result,
        result_file=f"eval/{file.name}" if file else "", curve=curve)
    (out / "README.md").write_text(model_card.render(facts))
    model_card.check(out)
    (out / MARK).write_text(json.dumps({"step": step, "adapter_digest": adapter_digest(adapter), "repo": repo}) + "\n")
    return out


def merge(settings: Settings, source: Source, out: Path) -> None:
    from recipe import merging

    trained = json.loads((source.folder / checkpoints.SETTINGS).read_text())["model"]
    here = checkpoints.training_settings(settings)["model"]
    if trained != here:
        what = trained if "/" in trained else f"the folder of that model, {trained}"
        raise AdapterError(f"{source.folder.name} was trained on {trained}, and MODEL is {here}: set MODEL to {what}")
    off, moved = merging.merge({"pretrained_model_name_or_path": settings.model, **settings.hub_revision},
                               source.folder, out)
    print(f"wrote {out} in bfloat16; mean |Δlogp| against base with adapter: {off:.2g} (the adapter moves the base by "
          f"{moved:.2g})")


def finished(out: Path, source: Source, repo: str) -> bool:
    """Whether `out` is a finished export of this checkpoint for `repo`, whose push may be tried again."""
    try:
        mark = json.loads((out / MARK).read_text())
    except (OSError, ValueError):
        return False
    return mark["adapter_digest"] == adapter_digest(source.folder) and mark["repo"] == repo


def push(out: Path, repo: str) -> None:
    """Checks the card and uploads the folder. Raises AdapterError, HubError."""
    from huggingface_hub import HfApi

    from recipe import model_card

    model_card.check(out)

    def upload() -> ValueError | None:
        try:
            HfApi().create_repo(repo, exist_ok=True, private=True)
            HfApi().upload_folder(repo_id=repo, folder_path=out, ignore_patterns=[MARK, "merged/**"],
                                  commit_message="Adapter and model card")
            if (out / "merged").is_dir():
                HfApi().upload_folder(repo_id=repo, folder_path=out / "merged", path_in_repo="merged",
                                      commit_message="Merged model")
        except ValueError as err:  # the Hub's own check of the card, and of the repository's name
            return err
        return None

    if refused := hub.repeat(upload, repo, f"pushing {out}"):
        raise AdapterError(f"the Hub refuses it: {refused}")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--checkpoint", help="checkpoint folder, or owner/name/checkpoint-N[@revision] (default: the "
                        "newest whole one in RUN_DIR/checkpoints)")
    parser.add_argument("--results", type=Path, help="results file of eval_adapter.py or eval_watch.py")
    parser.add_argument("--local-dir", type=Path, required=True, help="folder that is written")
    parser.add_argument("--merged", action="store_true", help="also write the merged model to LOCAL_DIR/merged")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the folder to this Hub repository")
    args = parser.parse_args(argv)
    out = args.local_dir
    try:
        settings = Settings.load()
        with tempfile.TemporaryDirectory(prefix="export-") as downloads:
            source = find_source(settings, args.checkpoint, Path(downloads))
            if not (args.push and finished(out, source, args.push)):
                export(source, args.results, out, args.push or settings.adapter_repo)
                print(f"wrote {out}")
            if args.merged and not (out / "merged").exists():
                merge(settings, source, out / "merged")
        if args.push:
            push(out, args.push)
            print(f"pushed to https://huggingface.co/{args.push}")
    except ModuleNotFoundError as err:
        print(missing_package(err), file=sys.stderr)
        return EXIT_UNAVAILABLE
    except hub.HubError as err:
        kept = f"\n{out} is complete; the same command pushes it again." if (out / MARK).exists() else ""
        print(f"not exported: {err}{kept}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except (SettingsError, AdapterError, OSError) as err:
        print(f"not exported: {err}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
