"""AsyncGRPOTrainer whose optimizer step is one GRPO group, with exact merged-weight sync and per-row health.

TRL draws a fixed number of rows or tokens per micro-batch from one stream of rows. Rollouts fork into several rows and
some are ungraded, so a step would soon begin and end in the middle of groups. Here the data loader yields whole groups,
`training_step` runs the group's rows one after the other, and each row's loss is weighted by its share of the group's
trained tokens: the gradient is that of the mean over the group's tokens, however the rows are cut.

Deviations from the stock trainer, each checked against TRL's shape by `check_shape`:
  get_train_dataloader    GroupStream instead of RolloutQueueDataset + batcher; nothing is prefetched, so that staleness
                          is that of the step in which a row is trained
  training_step           one call per group instead of one per micro-batch
  compute_loss            weight of the row, and log-probs kept for the importance ratio of each sequence
  _sync_weight            the canary looks whether the weights arrived (recipe/canary.py)
  _sync_weight_merged     streams W + scaling * B @ A, leaves the base alone (recipe/weight_sync.py), and records when
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout

from recipe import checkpoints, speed, task_cursor
from recipe.canary import Canary
from recipe.gpu_weight_transfer import FlatWeightTransfer
from recipe.groups import GroupCollator, GroupStream, measure_policy
from recipe.health import RowHealth, step_health
from recipe.sync_log import SyncLog
from recipe.task_cursor import ExactCursor
from recipe.trl_shape import expect_parameters, expect_source
from recipe.weight_sync import Stream, merged_parameters


def check_shape() -> None:
    """Raises TrlShapeError when the trainer is not the one that the overrides below were written against."""
    expect_parameters(AsyncGRPOTrainer.compute_loss,
                      ("self", "model", "inputs", "return_outputs", "num_items_in_batch"))
    expect_parameters(AsyncGRPOTrainer.training_step, ("self", "model", "inputs", "num_items_in_batch"))
    expect_parameters(AsyncGRPOTrainer._sync_weight_merged, ("self", "t0"))
    expect_source(AsyncGRPOTrainer.compute_loss, "outputs = model(input_ids=input_ids, position_ids=position_ids,",
                  "log_probs, entropy = outputs.log_probs, outputs.entropy",
                  "loss = loss / tokens_per_rank.to(torch.float32)")
    expect_source(AsyncGRPOTrainer._sync_weight, "t_pause, t_barrier, t_transfer = self._sync_weight_merged(t0)")
    expect_source(AsyncGRPOTrainer._sync_weight_merged, "model.merge_adapter()", "self._streaming_iter()",
                  "self.model_version += 1", "self.rollout_worker.update_model_version(self.model_version)")
    expect_source(AsyncGRPOTrainer.get_train_dataloader, "rollout_queue=self.rollout_queue",
                  "groups_trained=self._trained_groups", "self._rollout_dataset = dataset")
    expect_parameters(DataCollatorForRollout.torch_call, ("self", "examples"))
    task_cursor.check_shape()


class KeepOutputs:
    """Calls the model and keeps what it returned, for a caller that cannot see the loss function's inside."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.outputs = model, None

    def __call__(self, **inputs: Any) -> Any:
        self.outputs = self.model(**inputs)
        return self.outputs


class GroupGRPOTrainer(ExactCursor):
    """See the module's docstring. One process.

    `on_skip(reason)` is called for each group that is not trained, `while_waiting()` before each group and every second
    without rollouts; the end of the rollout worker saves what was trained by then.
    `canary` checks each sync; `zero_contrast` says what becomes of groups without contrast; several sequences share a
    row only within `row_tokens`; where gradient checkpointing is on, rows of up to `kept_tokens` do without.
    """

    def __init__(self, *args: Any, on_skip: Callable[[str], None] = lambda reason: None,
                 while_waiting: Callable[[], None] = lambda: None, canary: Canary | None = None,
                 zero_contrast: str = "train", row_tokens: int = 0, kept_tokens: int = 0, **kwargs: Any):
        check_shape()
        super().__init__(*args, **kwargs)
        if self.accelerator.num_processes != 1 or self.args.gradient_accumulation_steps != 1:
            raise ValueError("the trainer runs in one process and accumulates each group by itself: start it without "
                             "torchrun or accelerate launch, and leave gradient_accumulation_steps at 1")
        self.on_skip, self.while_waiting, self.canary = on_skip, while_waiting, canary
        self.zero_contrast, self.row_tokens, self.kept_tokens = zero_contrast, row_tokens, kept_tokens
        self.group_health: list[RowHealth] = []  # sequences of the last step
        self.syncs = SyncLog()

    def get_train_dataloader(self) -> DataLoader:
        def check_health() -> None:
            self.while_waiting()
            try:
                self.rollout_worker.check_health(self.args.heartbeat_stale_after_s)
            except RuntimeError:
                if self.state.global_step:
                    try:
                        self.save_between_steps()
                    except Exception as err:  # noqa: BLE001 - why the run ends is the other one
                        print(f"WARN: what was trained last could not be saved: {err}", flush=True)
                raise

        self._rollout_dataset = GroupStream(
            self.rollout_queue, lambda: self.model_version, check_health, self.args.max_staleness,
            self._trained_groups, self.on_skip, self.syncs,
            self.zero_contrast == "skip")
        collator = GroupCollator(self.processing_class.pad_token_id, groups_trained=self._trained_groups,
                                 metrics=self._metrics["train"], token_budget=self.args.token_budget or 0,
                                 sequences=self.args.per_device_train_batch_size, most=self.row_tokens,
                                 version=lambda: self.model_version, syncs=self.syncs)
        return DataLoader(self._rollout_dataset, batch_size=1, collate_fn=collator, num_workers=0)

    def save_between_steps(self) -> None:
        """A checkpoint of the last step, unless there is one: that may be on its way to the Hub."""
        last = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if checkpoints.damage(last) is not None:
            self._save_checkpoint(self.model, trial=None)
            self.callback_handler.on_save(self.args, self.state, self.control)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
                      ) -> torch.Tensor:
        """Forward and backward of a whole group; returns its loss."""
        self.group_health = [health for row in inputs["rows"] for health in row["health"]]
        loss = sum(super(GroupGRPOTrainer, self).training_step(model, row, num_items_in_batch)
                   for row in inputs["rows"])
        health = step_health(self.group_health)
        self._log_group(health)
        if self.zero_contrast == "hold" and not health["contrast"]:
            # AdamW passes over what has no gradient. One of zeros would let its momentum move on, and what that spoils
            # no later step repairs: where no rollout is right any more, no gradient ever comes again.
            model.zero_grad(set_to_none=True)
        return loss

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Any = None) -> torch.Tensor:
        if self.args.gradient_checkpointing:
            speed.recompute(model, inputs["input_ids"].numel() > self.kept_tokens)
        keeper = KeepOutputs(model)
        loss = super().compute_loss(keeper, inputs, num_items_in_batch=num_items_in_batch)
        measure_policy(keeper.outputs.log_probs.detach()[0], keeper.outputs.entropy.detach()[0], inputs,
                       self.epsilon_low, self.epsilon_high)
        return loss * inputs["weight"]

    def _log_group(self, health: dict[str, Any]) -> None:
        """The step's health into TRL's metrics, from which it goes to trackio."""
        sink = self._metrics["train"]
        for name in ("ratio_mean", "ratio_min", "ratio_max", "clipped", "kl", "entropy", "staleness_mean", "forks",
                     "realigned", "drift_tokens", "ungraded_rollouts", "contrast", "fresh_rows", "fresh_ratio_mean"):
            if health[name] is not None:
                sink[f"health/{name}"].append(float(health[name]))
        for age, of_age in health["by_staleness"].items():
            for name in ("ratio_mean", "ratio_min", "ratio_max", "clipped"):
                sink[f"health/{name}_stale_{age}"].append(of_age[name])
        for reason, count in self._rollout_dataset.skipped.items() if self._rollout_dataset else ():
            sink[f"health/skipped_{reason.replace(' ', '_')}"].append(float(count))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """HF's count takes one tensor of tokens; a group is several rows."""
        return sum(super(GroupGRPOTrainer, self).floating_point_ops(row) for row in inputs["rows"])

    def _streaming_iter(self) -> Stream:
        return merged_parameters(self.accelerator.unwrap_model(self.model), self.accelerator.device)

    def _sync_weight(self) -> None:
        super()._sync_weight()
        gap = self.canary.after_sync(self.model) if self.canary else None
        if gap is not None:
            self._metrics["train"]["sync/canary_gap"].append(gap)

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """TRL's merged sync without merging: what is streamed is computed, the base is not touched."""
        if torch.cuda.is_available():
            # The sender reads on streams of its own: what the optimizer wrote must have arrived.
            torch.cuda.synchronize()
        if isinstance(self.weight_transfer, FlatWeightTransfer):
            self.weight_transfer.stage(self._streaming_iter())  # all but the last copy, while the engine samples
        asked = time.time()
        self.weight_transfer.pause()
        paused = time.time()
        self.weight_transfer.send_weights(self._streaming_iter())
        sent = time.time()
        self.weight_transfer.resume()
        self._metrics["train"]["sync/paused_s"].append(time.time() - asked)
        self.model_version += 1
        self.syncs.add(asked, paused, self.model_version)
        self.rollout_worker.update_model_version(self.model_version)
        return paused, paused, sent
