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
  _sync_weight[_merged]   streams W + scaling * B @ A and leaves the base alone (recipe/weight_sync.py)
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from recipe.attention import sequence_spans
from recipe.rollout_worker import ROW
from recipe.trl_shape import expect_parameters, expect_source
from recipe.weight_sync import Stream, merged_parameters

POLL = 1.0  # seconds between two looks at the worker's health while the queue is empty
MAX_UNGRADED_GROUPS = 10  # in a row; more means that rollouts do not run at all


class NoGradedRollouts(RuntimeError):
    """Group after group came back without one graded rollout."""


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
    expect_source(AsyncGRPOTrainer._save_checkpoint, "next(g for g in itertools.count() if g not in trained)")


@dataclass
class RowHealth:
    """One trained sequence, as metrics.jsonl records it."""

    group: int
    rollout: int
    tokens: int
    trained: int  # tokens that carry loss
    tool_calls: int
    reward: float
    advantage: float
    staleness: int  # optimizer steps between the policy that began the rollout and the one trained
    fresh: bool  # sampled from first to last token under the weights that are trained
    ratio: float = float("nan")  # mean importance ratio of the trained tokens
    ratio_min: float = float("nan")
    ratio_max: float = float("nan")


class GroupStream(IterableDataset):
    """Yields one group after the other as a list of sample dicts, in the order in which they were finished.

    Groups older than `max_staleness` optimizer steps and groups without a graded rollout are left out, counted in
    `skipped` and reported to `on_skip(reason)`.
    """

    def __init__(self, rows: Any, version: Callable[[], int], check_health: Callable[[], None], max_staleness: int,
                 done: set[int], on_skip: Callable[[str], None]):
        self.rows, self.version, self.check_health = rows, version, check_health
        self.max_staleness, self.done, self.on_skip = max_staleness, done, on_skip
        self.wait_s = 0.0  # read and reset by the trainer at each step
        self.skipped = {"stale": 0, "ungraded": 0}
        self.last_group: list[RolloutSample] = []

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        ungraded = 0
        while True:
            group = self._next_group()
            reason = self._unusable(group)
            if reason is None:
                ungraded = 0
                self.last_group = group
                yield [self._as_dict(sample) for sample in group]
                continue
            # Also a skipped group is done: the prompt at which a resumed run begins is the first that is not.
            self.done.add(group[0].group_id)
            self.skipped[reason] += 1
            self.on_skip(reason)
            ungraded = ungraded + 1 if reason == "ungraded" else 0
            if ungraded >= MAX_UNGRADED_GROUPS:
                raise NoGradedRollouts(
                    f"{ungraded} groups in a row had no graded rollout, so there is nothing to train on. The reasons "
                    "stand above, one per rollout; see logs/env.log and logs/policy.log for their other side.")

    def _unusable(self, group: list[RolloutSample]) -> str | None:
        if not group[0].input_ids:
            return "ungraded"
        return "stale" if self.version() - group[0].model_version > self.max_staleness else None

    def _next_group(self) -> list[RolloutSample]:
        """All rows of the next group: the worker queues them one after the other and says how many they are."""
        group = [self._next_row()]
        while len(group) < group[0].metrics[ROW + "rows"]:
            row = self._next_row()
            if row.group_id != group[0].group_id:
                raise RuntimeError(f"row of group {row.group_id} inside group {group[0].group_id}, of which "
                                   f"{len(group)} of {group[0].metrics[ROW + 'rows']:.0f} rows had arrived")
            group.append(row)
        return group

    def _next_row(self) -> RolloutSample:
        started = time.monotonic()
        while True:
            try:
                row = self.rows.get(timeout=POLL)
                self.wait_s += time.monotonic() - started
                return row
            except queue.Empty:
                self.check_health()

    def _as_dict(self, sample: RolloutSample) -> dict[str, Any]:
        return {name: getattr(sample, name) for name in (
            "input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics", "model_version")}


def pack(group: list[dict[str, Any]], token_budget: int) -> list[list[dict[str, Any]]]:
    """Cuts a group into rows of at most `token_budget` tokens, longest sequence first; 0 gives one sequence a row.

    A sequence beyond the budget gets a row of its own: nothing is dropped.
    """
    rows: list[list[dict[str, Any]]] = []
    for sample in sorted(group, key=lambda s: len(s["input_ids"]), reverse=True):
        size = len(sample["input_ids"])
        for row in rows:
            if token_budget > 0 and sum(len(s["input_ids"]) for s in row) + size <= token_budget:
                row.append(sample)
                break
        else:
            rows.append([sample])
    return rows


@dataclass
class GroupCollator(DataCollatorForRollout):
    """One group -> {"rows": [one packed TRL batch per row]}, each with its sequences' health and its weight."""

    version: Callable[[], int] = lambda: 0

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        (group,) = examples
        total = sum(sum(sample["completion_mask"]) for sample in group)
        version, rows = self.version(), []
        for row in pack(group, self.token_budget):
            health = [row_health(sample, version) for sample in row]
            plain = [sample | {"metrics": {k: v for k, v in sample["metrics"].items() if not k.startswith(ROW)}}
                     for sample in row]
            batch = super().torch_call([[plain]])
            rows.append(batch | {"weight": sum(h.trained for h in health) / total, "health": health})
        return {"rows": rows}


def row_health(sample: dict[str, Any], version: int) -> RowHealth:
    m = sample["metrics"]
    began = int(m[ROW + "version"])
    return RowHealth(group=sample["group_id"], rollout=int(m[ROW + "rollout"]), tokens=len(sample["input_ids"]),
                     trained=sum(sample["completion_mask"]), tool_calls=int(m[ROW + "tool_calls"]), reward=m["reward"],
                     advantage=sample["advantage"], staleness=version - began,
                     fresh=bool(m[ROW + "one_version"]) and began == version)


class KeepOutputs:
    """Calls the model and keeps what it returned, for a caller that cannot see the loss function's inside."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.outputs = model, None

    def __call__(self, **inputs: Any) -> Any:
        self.outputs = self.model(**inputs)
        return self.outputs


class GroupGRPOTrainer(AsyncGRPOTrainer):
    """See the module's docstring. One process.

    `on_skip(reason)` is called for each group that is not trained, `while_waiting()` every second without rollouts.
    """

    def __init__(self, *args: Any, on_skip: Callable[[str], None] = lambda reason: None,
                 while_waiting: Callable[[], None] = lambda: None, **kwargs: Any):
        check_shape()
        super().__init__(*args, **kwargs)
        if self.accelerator.num_processes != 1 or self.args.gradient_accumulation_steps != 1:
            raise ValueError("the trainer runs in one process and accumulates each group by itself: start it without "
                             "torchrun or accelerate launch, and leave gradient_accumulation_steps at 1")
        self.on_skip, self.while_waiting = on_skip, while_waiting
        self.group_health: list[RowHealth] = []  # sequences of the last step

    def get_train_dataloader(self) -> DataLoader:
        def check_health() -> None:
            self.while_waiting()
            self.rollout_worker.check_health(self.args.heartbeat_stale_after_s)

        self._rollout_dataset = GroupStream(
            self.rollout_queue, lambda: self.model_version, check_health, self.args.max_staleness,
            self._trained_groups, self.on_skip)
        collator = GroupCollator(self.processing_class.pad_token_id, groups_trained=self._trained_groups,
                                 metrics=self._metrics["train"], token_budget=self.args.token_budget or 0,
                                 version=lambda: self.model_version)
        return DataLoader(self._rollout_dataset, batch_size=1, collate_fn=collator, num_workers=0)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
                      ) -> torch.Tensor:
        """Forward and backward of a whole group; returns its loss."""
        self.group_health = [health for row in inputs["rows"] for health in row["health"]]
        loss = sum(super(GroupGRPOTrainer, self).training_step(model, row, num_items_in_batch)
                   for row in inputs["rows"])
        self._log_group()
        return loss

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
                     num_items_in_batch: Any = None) -> torch.Tensor:
        keeper = KeepOutputs(model)
        loss = super().compute_loss(keeper, inputs, num_items_in_batch=num_items_in_batch)
        measure_ratio(keeper.outputs.log_probs.detach()[0], inputs)
        return loss * inputs["weight"]

    def _log_group(self) -> None:
        fresh = [h for h in self.group_health if h.fresh]
        sink = self._metrics["train"]
        sink["ratio/min"].append(min(h.ratio_min for h in self.group_health))
        sink["ratio/max"].append(max(h.ratio_max for h in self.group_health))
        sink["sample/staleness_mean"].append(sum(h.staleness for h in self.group_health) / len(self.group_health))
        sink["sample/fresh_rows_total"].append(float(len(fresh)))
        if fresh:
            sink["ratio/fresh"].append(token_mean(fresh))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """HF's count takes one tensor of tokens; a group is several rows."""
        return sum(super(GroupGRPOTrainer, self).floating_point_ops(row) for row in inputs["rows"])

    def _streaming_iter(self) -> Stream:
        return merged_parameters(self.accelerator.unwrap_model(self.model), self.accelerator.device)

    def _sync_weight(self) -> None:
        self.rollout_worker.begin_sync()
        super()._sync_weight()

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """TRL's merged sync without merging: what is streamed is computed, the base is not touched."""
        self.weight_transfer.pause()
        paused = time.time()
        if torch.cuda.is_available():
            # The sender reads on streams of its own: what the optimizer wrote must have arrived.
            torch.cuda.synchronize()
        self.weight_transfer.send_weights(self._streaming_iter())
        sent = time.time()
        self.weight_transfer.resume()
        self.model_version += 1
        self.rollout_worker.update_model_version(self.model_version)
        return paused, paused, sent


def measure_ratio(log_probs: torch.Tensor, inputs: dict[str, Any]) -> None:
    """Writes the importance ratio of each sequence into its RowHealth; `log_probs` (T - 1,) begin with token 1."""
    mask = inputs["completion_mask"][0].bool()
    log_ratio = torch.zeros(mask.shape, device=log_probs.device)
    log_ratio[1:] = log_probs - inputs["old_log_probs"][0, 1:]
    for health, (start, end) in zip(inputs["health"], sequence_spans(inputs["position_ids"][0]), strict=True):
        ratio = log_ratio[start:end][mask[start:end]].exp()
        health.ratio, health.ratio_min, health.ratio_max = (float(x) for x in (ratio.mean(), ratio.min(), ratio.max()))


def token_mean(rows: list[RowHealth]) -> float:
    """Mean importance ratio over the trained tokens of `rows`."""
    return sum(h.ratio * h.trained for h in rows) / sum(h.trained for h in rows)
