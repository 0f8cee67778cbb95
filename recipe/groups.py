"""GRPO groups on their way from the rollout worker's queue to the trainer: whole, cut into rows, each with its health.

The worker queues training rows; `GroupStream` puts a group's rows together again, `GroupCollator` cuts the group into
the rows of one optimizer step and weights each by its trained tokens, and `measure_policy` fills in what the forward
pass says about every sequence.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import IterableDataset
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from recipe.attention import sequence_spans
from recipe.health import RowHealth, has_contrast
from recipe.rollout_worker import DRIFT, ROW
from recipe.sync_log import SyncLog

POLL = 1.0  # seconds between two looks at the worker's health while the queue is empty; else one for each group
MAX_UNGRADED_GROUPS = 10  # in a row; more means that rollouts do not run at all
MAX_FLAT_GROUPS = 100  # in a row; more means that these tasks teach this policy nothing


class NoGradedRollouts(RuntimeError):
    """Group after group came back without one graded rollout."""


class NoContrast(RuntimeError):
    """Group after group had equal rewards, and ZERO_CONTRAST=skip leaves such groups out, or had no row at all."""


class GroupStream(IterableDataset):
    """Yields one group after the other as a list of sample dicts, in the order in which they were finished.

    Groups with a rollout that began more than `max_staleness` optimizer steps ago and groups without a graded rollout
    are left out, counted in `skipped` and reported to `on_skip(reason)`; with `skip_flat` so are groups whose rewards
    are all equal.
    """

    def __init__(self, rows: Any, version: Callable[[], int], check_health: Callable[[], None], max_staleness: int,
                 done: set[int], on_skip: Callable[[str], None], syncs: SyncLog, skip_flat: bool = False):
        self.rows, self.version, self.check_health, self.syncs = rows, version, check_health, syncs
        self.max_staleness, self.done, self.on_skip, self.skip_flat = max_staleness, done, on_skip, skip_flat
        self.wait_s = 0.0  # read and reset by the trainer at each step
        self.skipped = {"stale": 0, "ungraded": 0, "no contrast": 0}
        self.last_group: list[RolloutSample] = []

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        ungraded = flat = 0
        while True:
            group = self._next_group()
            reason = self._unusable(group)
            if reason is None:
                ungraded = flat = 0
                self.last_group = group
                yield [self._as_dict(sample) for sample in group]
                continue
            # Also a skipped group is done: the prompt at which a resumed run begins is the first that is not.
            self.done.add(group[0].group_id)
            self.skipped[reason] += 1
            self.on_skip(reason)
            ungraded = ungraded + 1 if reason == "ungraded" else 0
            flat = flat + 1 if reason == "no contrast" else 0
            if flat >= MAX_FLAT_GROUPS:
                raise NoContrast(f"the rewards of {flat} groups in a row were all equal: every task is solved always "
                                 "or never, or no turn carries loss (TRAIN_TURNS). Choose other tasks, or set "
                                 "ZERO_CONTRAST=train to go through them anyway.")
            if ungraded >= MAX_UNGRADED_GROUPS:
                raise NoGradedRollouts(
                    f"{ungraded} groups in a row had no graded rollout, so there is nothing to train on. The reasons "
                    "stand above, one per rollout; see logs/env.log and logs/policy.log for their other side.")

    def _unusable(self, group: list[RolloutSample]) -> str | None:
        if not group[0].input_ids:
            return "no contrast" if group[0].metrics.get(ROW + "rowless") else "ungraded"
        oldest = min(sampled_by(row.metrics, row.model_version, self.syncs)[0] for row in group)
        if self.version() - oldest > self.max_staleness:
            return "stale"
        rewards = [row.metrics["reward"] for row in group] + group[0].metrics.get(ROW + "rowless", [])
        return "no contrast" if self.skip_flat and not has_contrast(rewards) else None

    def _next_group(self) -> list[RolloutSample]:
        """All rows of the next group: the worker queues them one after the other and says how many they are."""
        self.check_health()  # rows that still lie in the queue must not hide that no more will come
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


def pack(group: list[dict[str, Any]], token_budget: int, sequences: int = 1, most: int = 0
         ) -> list[list[dict[str, Any]]]:
    """Cuts a group into rows of at most `token_budget` tokens, longest first; with 0 of at most `sequences` sequences,
    several of them only within `most` tokens (0: without such a limit).

    A sequence beyond the budget gets a row of its own: nothing is dropped.
    """
    rows: list[list[dict[str, Any]]] = []
    for sample in sorted(group, key=lambda s: len(s["input_ids"]), reverse=True):
        size = len(sample["input_ids"])
        for row in rows:
            limit = token_budget if token_budget > 0 else most
            full = token_budget <= 0 and len(row) >= sequences
            if not full and (not limit or sum(len(s["input_ids"]) for s in row) + size <= limit):
                row.append(sample)
                break
        else:
            rows.append([sample])
    return rows


@dataclass
class GroupCollator(DataCollatorForRollout):
    """One group -> {"rows": [one packed TRL batch per row]}, each with its sequences' health and its weight."""

    sequences: int = 1  # of a row where there is no token budget, as long as they have at most `most` tokens
    most: int = 0
    version: Callable[[], int] = lambda: 0
    syncs: SyncLog = field(default_factory=SyncLog)

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        (group,) = examples
        total = sum(sum(sample["completion_mask"]) for sample in group)
        version, rows = self.version(), []
        for row in pack(group, self.token_budget, self.sequences, self.most):
            health = [row_health(sample, version, self.syncs) for sample in row]
            plain = [sample | {"metrics": {k: v for k, v in sample["metrics"].items() if not k.startswith(ROW)}}
                     for sample in row]
            batch = super().torch_call([[plain]])
            rows.append(batch | {"weight": sum(h.trained for h in health) / total, "health": health})
        return {"rows": rows}


def sampled_by(metrics: dict[str, float], dispatched: int, syncs: SyncLog) -> tuple[int, int | None]:
    """Versions that sampled a row's first and last token. Where its calls' times are unknown: the version current when
    its group was dispatched, TRL's measure and never too young, and None."""
    return syncs.versions_between(metrics[ROW + "first_call"], metrics[ROW + "last_call"]) or (dispatched, None)


def row_health(sample: dict[str, Any], version: int, syncs: SyncLog) -> RowHealth:
    m = sample["metrics"]
    began, ended = sampled_by(m, sample["model_version"], syncs)
    return RowHealth(group=sample["group_id"], rollout=int(m[ROW + "rollout"]), tokens=len(sample["input_ids"]),
                     trained=sum(sample["completion_mask"]), tool_calls=int(m[ROW + "tool_calls"]), reward=m["reward"],
                     advantage=sample["advantage"], staleness=version - began,
                     fresh=began == ended == version, sampled=int(m[ROW + "rollouts"]),
                     rowless=m.get(ROW + "rowless", []), **{name: int(m[ROW + name]) for name in DRIFT})


def measure_policy(log_probs: torch.Tensor, entropy: torch.Tensor, inputs: dict[str, Any], low: float, high: float
                   ) -> None:
    """Writes what the forward pass says about each sequence into its RowHealth.

    `log_probs` and `entropy` (T - 1,) begin with token 1; `low` and `high` are how far the ratio may leave 1.
    """
    mask = inputs["completion_mask"][0].bool()
    log_ratio = torch.zeros(mask.shape, device=log_probs.device)
    log_ratio[1:] = log_probs - inputs["old_log_probs"][0, 1:]
    entropy = torch.cat([entropy.new_zeros(1), entropy])
    for health, (start, end) in zip(inputs["health"], sequence_spans(inputs["position_ids"][0]), strict=True):
        trained = mask[start:end]
        logs = log_ratio[start:end][trained]
        ratio = logs.exp()
        clipped = ratio > 1 + high if health.advantage > 0 else ratio < 1 - low
        figures = (ratio.mean(), ratio.min(), ratio.max(), (clipped & (health.advantage != 0)).float().mean(),
                   (ratio - 1 - logs).mean(), entropy[start:end][trained].mean())
        (health.ratio, health.ratio_min, health.ratio_max, health.clipped, health.kl,
         health.entropy) = torch.stack([f.float() for f in figures]).tolist()
