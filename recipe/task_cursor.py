"""Where a resumed run goes on in the tasks: no group that the checkpoint trained comes again, none is left out.

TRL's checkpoint names the first group that was not trained, and a resumed run begins there. Groups finish out of order,
so some behind it were trained: TRL would train them twice. Their numbers are saved beside it, and the worker leaves
them out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from recipe.trl_shape import expect_parameters, expect_source
from recipe.watchdog import write_atomic

FILE = "task_cursor.json"


def check_shape() -> None:
    """Raises TrlShapeError when TRL counts groups in another way than the one that is corrected here."""
    expect_parameters(AsyncGRPOTrainer._save_checkpoint, ("self", "model", "trial"))
    expect_source(AsyncGRPOTrainer._save_checkpoint,
                  "first_untrained = next(g for g in itertools.count() if g not in trained)",
                  'prompt_index = self.rollout_worker._loop_kwargs["dataset_start_index"] + first_untrained')
    expect_source(AsyncGRPOTrainer._inner_training_loop,
                  'self.rollout_worker._loop_kwargs["dataset_start_index"] = rollout_state["prompt_index"]')


def ahead(trained: set[int]) -> list[int]:
    """The trained groups behind the first that is not, counted from that one."""
    first = next(g for g in itertools.count() if g not in trained)
    return sorted(g - first for g in trained if g > first)


def without(groups: Iterator[tuple[int, Any]], left_out: set[int]) -> Iterator[tuple[int, Any]]:
    """The worker's stream of (group, row) pairs without the groups that were trained before."""
    return ((group, row) for group, row in groups if group not in left_out)


class ExactCursor(AsyncGRPOTrainer):
    """The trainer's side; RolloutLoop takes `trained_ahead` on the worker's."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        write_atomic(folder / FILE, json.dumps({"trained_ahead": ahead(self._trained_groups)}) + "\n")
        super()._save_checkpoint(model, trial)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._trained_groups.clear()
        if isinstance(self.rollout_worker, AsyncRolloutWorker):
            checkpoint = kwargs.get("resume_from_checkpoint")
            trained = json.loads((Path(checkpoint) / FILE).read_text())["trained_ahead"] if checkpoint else []
            self._trained_groups.update(trained)
            self.rollout_worker._loop_kwargs["trained_ahead"] = trained
        return super()._inner_training_loop(*args, **kwargs)
