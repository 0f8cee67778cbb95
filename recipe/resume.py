"""Where a training goes on: the newest whole checkpoint of the run folder and of the adapter repository.

    RUN_DIR=runs/a python -m recipe.resume      # finds and fetches it, trains nothing; run_job.sh does so first

So a token without write rights, a repository of another run and changed settings are told before a server is started.
A checkpoint that has all steps becomes the final adapter or model, and RUN_DIR/trained says so.
Exit codes: 0 ok; 64 wrong settings, a checkpoint of other settings, or the Hub refuses; 69 it can't be reached.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from recipe import checkpoints, hub, resume_command
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser
from recipe.hub import CheckpointPusher
from recipe.watchdog import write_atomic

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")


def open_checkpoints(settings: Settings, resume: str) -> tuple[Path | None, CheckpointPusher | None]:
    """The checkpoint to go on from, and the way to the adapter repository; each None when there is none.

    Whole checkpoints of the run folder that the repository lacks are pushed: a crash came between.
    Raises SettingsError, CheckpointError, HubError.
    """
    root = settings.run_path / "checkpoints"
    broken: dict[str, str] = {}
    newest = checkpoints.newest_checkpoint(root, broken)
    pusher, there = None, set()
    if settings.adapter_repo:
        pusher = CheckpointPusher(settings.adapter_repo)
        there = pusher.open()
    if resume == "never":
        if newest or there:
            raise SettingsError(f"RESUME=never, but {newest or settings.adapter_repo} holds checkpoints that a later "
                                "resume would take for this run's: choose another RUN_DIR or ADAPTER_REPO.")
        return None, pusher
    if pusher:
        newest = hub.fetch_newest(settings.adapter_repo, root, checkpoints.step_of(newest) if newest else 0, broken
                                  ) or newest
    # The very first checkpoint of a run that was killed while it wrote it is no loss: such a run goes on by itself.
    unsealed = [folder for folder in checkpoints.folders(root) if not (folder / checkpoints.MANIFEST).exists()]
    if not newest and broken and not len(broken) == len(unsealed) == 1:
        other = f", with another ADAPTER_REPO than {settings.adapter_repo}," if there else ""
        raise checkpoints.CheckpointError(
            "There are checkpoints, but none is whole:\n"
            + "".join(f"  {name}: {wrong}\n" for name, wrong in broken.items())
            + f"Nothing was deleted. Put their files back to go on, or begin anew at the base{other} with:\n"
            f"  RESUME=never {resume_command.of_this_job()}")
    if newest:
        checkpoints.check_settings(newest, settings)
        if pusher:
            for folder in checkpoints.folders(root):
                if checkpoints.step_of(folder) not in there and checkpoints.damage(folder) is None:
                    pusher.push(folder)
    return newest, pusher


def all_steps(checkpoint: Path, settings: Settings) -> str | None:
    """What to say of a checkpoint after which nothing is left to train; None where something is."""
    step = checkpoints.step_of(checkpoint)
    return None if step < settings.max_steps else (
        f"{checkpoint.name} has all {settings.max_steps} steps that MAX_STEPS asks for, nothing is left to train; to "
        f"train on set MAX_STEPS above {step}")


def adopt(checkpoint: Path, final: Path) -> None:
    """Makes the checkpoint of a run that had all its steps the final adapter or model."""
    final.mkdir(exist_ok=True)
    for path in checkpoint.iterdir():
        if path.name in (*hub.ROOT_FILES, *MODEL_FILES) or path.match("model*.safetensors"):
            shutil.copyfile(path, final / path.name)


def mark_trained(settings: Settings) -> None:
    """The final adapter or model is whole: run_job.sh trains no more and goes on with the evaluation."""
    write_atomic(settings.run_path / "trained", f"{settings.max_steps}\n")


def main(argv: list[str] | None = None) -> int:
    Parser(__doc__).parse_args(argv)
    try:
        settings = Settings.load()
        checkpoint, pusher = open_checkpoints(settings, settings.resume)
        if pusher:
            pusher.finish()
            print(f"{settings.adapter_repo} can be written", flush=True)
    except (SettingsError, checkpoints.CheckpointError) as err:
        print(f"nothing was started:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    except hub.HubError as err:
        print(f"nothing was started: {err}", file=sys.stderr)
        return EXIT_USAGE if err.refused else EXIT_UNAVAILABLE
    if checkpoint and (done := all_steps(checkpoint, settings)):
        adopt(checkpoint, settings.final_path)
        mark_trained(settings)
        print(f"{done}. It is the final {settings.final_path.name}", flush=True)
    elif checkpoint:
        print(f"the training goes on from {checkpoint.name}", flush=True)
    else:
        print("the training begins at the base model", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
