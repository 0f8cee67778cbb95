"""Seals every checkpoint of the trainer and hands it to the pusher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from recipe import checkpoints
from recipe.config import Settings
from recipe.hub import CheckpointPusher


class CheckpointCallback(TrainerCallback):
    """`pusher` is None without an ADAPTER_REPO; its lasting failures end the training (HubError)."""

    def __init__(self, root: Path, settings: Settings, pusher: CheckpointPusher | None):
        self.root, self.settings, self.pusher = root, settings, pusher

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = checkpoints.seal(self.root / f"checkpoint-{state.global_step}", self.settings)
        print(f"{folder.name} saved", flush=True)
        if self.pusher:
            self.pusher.push(folder)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.pusher:
            self.pusher.check()
