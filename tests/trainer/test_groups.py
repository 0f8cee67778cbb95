"""Groups as the trainer sees them: whole, in order, weighted by their tokens, and counted when they are skipped."""

from __future__ import annotations

import math
import queue

import pytest
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from recipe.callbacks import line, summary_text
from recipe.groups import (
    MAX_FLAT_GROUPS,
    MAX_UNGRADED_GROUPS,
    GroupCollator,
    GroupStream,
    NoContrast,
    NoGradedRollouts,
    measure_policy,
    pack,
    row_health,
)
from recipe.health import RowHealth
from recipe.rollout_worker import DRIFT, ROW
from recipe.sync_log import SyncLog

# Version v came at 10 v, when the engine was paused for two seconds: one to stop it, one to replace the weights.
SYNCS = SyncLog()
for number in range(1, 7):
    SYNCS.add(10.0 * number, 10.0 * number + 1, number)


def sample(group: int, rows: int, tokens: int = 6, trained: int = 2, version: int = 1, rollout: int = 0,
           calls: tuple[float, float] | None = None, reward: float = 1.0) -> RolloutSample:
    """A row dispatched under `version`; its model is called at the times `calls`, soon after by default."""
    first, last = calls or (10.0 * version + 3, 10.0 * version + 5)
    mask = [0] * (tokens - trained) + [1] * trained
    metrics = {"reward": reward, ROW + "rollouts": 4.0, ROW + "rows": rows, ROW + "rollout": rollout,
               ROW + "tool_calls": 3.0, ROW + "first_call": first, ROW + "last_call": last,
               **{ROW + name: 0.0 for name in DRIFT}}
    return RolloutSample(prompt=[], completion=[], input_ids=list(range(tokens)), completion_mask=mask,
                         old_log_probs=[-0.5] * tokens, advantage=1.0, model_version=version, group_id=group,
                         metrics=metrics)


def stream(rows: list[RolloutSample], version: int = 1, check=lambda: None, **more) -> GroupStream:
    rows_queue: queue.Queue = queue.Queue()
    for row in rows:
        rows_queue.put(row)
    return GroupStream(rows_queue, lambda: version, check, max_staleness=4, done=set(), syncs=SYNCS, **{
        "on_skip": lambda reason: None, **more})


def test_groups_arrive_whole_and_in_order():
    groups = iter(stream([sample(0, 2), sample(0, 2), sample(2, 1), sample(1, 3), sample(1, 3), sample(1, 3)]))
    assert [[row["group_id"] for row in next(groups)] for _ in range(3)] == [[0, 0], [2], [1, 1, 1]]


def test_stale_and_ungraded_groups_are_skipped_counted_and_done():
    reasons = []
    source = stream([sample(0, 2, version=1), sample(0, 2, version=1), sample(1, 1, tokens=0, trained=0, version=6),
                     sample(2, 1, version=2)], version=6, on_skip=reasons.append)
    assert next(iter(source))[0]["group_id"] == 2  # four steps old: the oldest usable
    assert reasons == ["stale", "ungraded"] and source.skipped == {"stale": 1, "ungraded": 1, "no contrast": 0}
    assert source.done == {0, 1}, "a resumed run does not begin before them"


def test_groups_without_contrast_are_trained_or_skipped_by_setting():
    rows = [sample(0, 2, reward=1.1), sample(0, 2, reward=1.1), sample(1, 2, reward=1.1), sample(1, 2)]
    assert next(iter(stream(rows)))[0]["group_id"] == 0
    reasons = []
    source = stream(rows, skip_flat=True, on_skip=reasons.append)
    assert next(iter(source))[0]["group_id"] == 1
    assert reasons == ["no contrast"] and source.skipped["no contrast"] == 1 and source.done == {0}


def test_tasks_without_any_contrast_end_the_training():
    flat = [sample(g, 1) for g in range(MAX_FLAT_GROUPS)]
    with pytest.raises(NoContrast, match=f"{MAX_FLAT_GROUPS} groups in a row.*ZERO_CONTRAST=train"):
        next(iter(stream(flat, skip_flat=True)))
    other = [sample(999, 2), sample(999, 2, reward=0.0)]
    assert next(iter(stream([*flat[1:], *other], skip_flat=True)))[0]["group_id"] == 999


def test_rollouts_that_never_run_end_the_training():
    empty = [sample(g, 1, tokens=0, trained=0) for g in range(MAX_UNGRADED_GROUPS)]
    with pytest.raises(NoGradedRollouts, match=rf"{MAX_UNGRADED_GROUPS} groups in a row.*logs/env.log"):
        next(iter(stream(empty)))
    # one graded group in between starts the count anew
    groups = iter(stream([*empty[1:], sample(50, 1), *empty[1:], sample(51, 1)]))
    assert [next(groups)[0]["group_id"] for _ in range(2)] == [50, 51]


def test_rows_of_two_groups_mixed_are_an_error():
    with pytest.raises(RuntimeError, match="row of group 1 inside group 0"):
        next(iter(stream([sample(0, 2), sample(1, 1)])))


def test_health_is_checked_for_each_group_and_while_waiting(monkeypatch):
    monkeypatch.setattr("recipe.groups.POLL", 0.01)

    def dead():
        raise RuntimeError("the worker is gone")

    with pytest.raises(RuntimeError, match="the worker is gone"):
        next(iter(stream([sample(0, 1)], check=dead)))  # also where a group lies ready
    looks = iter([lambda: None, dead])
    with pytest.raises(RuntimeError, match="the worker is gone"):
        next(iter(stream([sample(0, 2)], check=lambda: next(looks)())))


def test_packing_drops_nothing():
    rows = [{"input_ids": [0] * n} for n in (3, 9, 4, 20, 5)]
    assert [[len(s["input_ids"]) for s in row] for row in pack(rows, 0)] == [[20], [9], [5], [4], [3]]
    assert [[len(s["input_ids"]) for s in row] for row in pack(rows, 12)] == [[20], [9, 3], [5, 4]]


@pytest.mark.parametrize("token_budget", [0, 9, 14, 1000])
def test_weights_make_the_loss_the_mean_over_the_groups_tokens(token_budget):
    """TRL takes the token mean of each row; weighted, their sum is the token mean of the group however it is cut."""
    group = [vars_of(sample(0, 4, tokens=n, trained=t, rollout=i)) for i, (n, t) in enumerate(
        [(6, 2), (5, 4), (9, 1), (4, 3)])]
    batch = GroupCollator(pad_token_id=0, token_budget=token_budget, version=lambda: 1, syncs=SYNCS).torch_call([group])
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(4, 16, generator=generator)  # a loss for each rollout's token
    total = 0.0
    for row in batch["rows"]:
        losses = torch.cat([table[h.rollout, :h.tokens] for h in row["health"]])
        mask = row["completion_mask"][0].bool()
        assert float(row["global_n_tokens"][0]) == int(mask.sum())
        total += float(losses[mask].mean()) * row["weight"]
    expected = torch.cat([table[i, n - t:n] for i, (n, t) in enumerate([(6, 2), (5, 4), (9, 1), (4, 3)])]).mean()
    assert total == pytest.approx(float(expected), abs=1e-6)
    assert sum(row["weight"] for row in batch["rows"]) == pytest.approx(1)


def vars_of(made: RolloutSample) -> dict:
    return {name: getattr(made, name) for name in RolloutSample.__slots__}


@pytest.mark.parametrize(("first", "last", "fresh", "staleness"), [
    (33, 39.9, True, 0),  # wholly under version 3
    (31, 38, True, 0),  # arrived while the engine was paused for version 3: waited for it
    (30.5, 38, False, 1),  # arrived before the pause was confirmed: may have begun under version 2
    (29, 38, False, 1),  # spans the sync
    (33, 40.5, False, 0),  # ended after the next pause was asked for
    (22, 29, False, 1),  # wholly under version 2
    (math.nan, math.nan, False, 2),  # unknown: as old as its dispatch, version 1
    (5, 38, False, 2),  # before the first sync
])
def test_fresh_means_that_the_trained_version_sampled_all_of_it(first, last, fresh, staleness):
    health = row_health(vars_of(sample(0, 1, version=1, calls=(first, last))), 3, SYNCS)
    assert (health.fresh, health.staleness) == (fresh, staleness)


def test_age_of_a_group_is_that_of_its_oldest_rollout():
    late, early = sample(0, 2, version=1, calls=(53, 55)), sample(0, 2, version=1, calls=(13, 55))
    groups = stream([late, late, early, late, sample(1, 1, version=6)], version=6)
    assert [next(iter(groups))[0]["group_id"] for _ in range(2)] == [0, 1]
    assert groups.skipped == {"stale": 1, "ungraded": 0, "no contrast": 0}


def test_ratio_of_each_packed_sequence():
    collator = GroupCollator(pad_token_id=0, token_budget=100, version=lambda: 1, syncs=SYNCS)
    group = [vars_of(sample(0, 2, tokens=5, trained=2)), vars_of(sample(0, 2, tokens=4, trained=3, rollout=1))]
    (row,) = collator.torch_call([group])["rows"]
    log_probs = torch.full((8,), -0.5)  # as sampled, ratio 1 ...
    log_probs[3] = -0.5 + 0.3  # ... but for the last token of the first sequence
    log_probs[4] = 7.0  # predicts the second sequence's first token from the first sequence: never used
    entropy = torch.arange(8.0)
    measure_policy(log_probs, entropy, row, low=0.2, high=0.28)
    first, second = row["health"]
    high = math.exp(0.3)
    assert first.ratio == pytest.approx((1 + high) / 2) and first.ratio_min == pytest.approx(1)
    assert first.ratio_max == pytest.approx(high) and first.clipped == 0.5, "advantage 1: only above 1.28"
    assert first.kl == pytest.approx((high - 1 - 0.3) / 2, abs=1e-6) and first.entropy == 2.5, "of tokens 3 and 4"
    assert (second.ratio, second.ratio_min, second.ratio_max) == pytest.approx((1, 1, 1))
    assert (second.clipped, second.entropy) == (0, 6) and second.kl == pytest.approx(0)
    for advantage, clipped in ((-1.0, 0), (0.0, 0)):  # a high ratio is not clipped where it is to be lowered
        first.advantage = advantage
        measure_policy(log_probs, entropy, row, low=0.2, high=0.28)
        assert first.clipped == clipped
    log_probs[3] = -0.5 - 0.3
    first.advantage = -1.0
    measure_policy(log_probs, entropy, row, low=0.2, high=0.28)
    assert first.clipped == 0.5


def test_summary_counts_rows_outside_the_band():
    base = {"steps": 2, "seconds": 75.0, "rows": 9, "groups_without_contrast": 1, "skipped_groups": {"stale": 1}}
    none = summary_text(base | {"fresh_rows": 0})
    assert "1m15s" in none and "1 stale" in none and "could not be checked" in none
    some = summary_text(base | {"fresh_rows": 2, "fresh_ratio_mean": 1.003, "fresh_ratio_min": 0.9999,
                                "fresh_ratio_max": 1.006, "fresh_rows_outside": 1})
    assert "2 of 9" in some and "1.003000" in some and "1 outside 0.998–1.002" in some


def test_line_of_a_step_names_every_figure():
    health = RowHealth(0, 0, 10, 2, 1, 1.0, 0.0, 0, True, ratio_min=0.9, ratio_max=1.1)
    record = {"step": 7, "max_steps": 30, "seconds": 12.3, "eta_seconds": 3700, "reward_mean": 0.52, "reward_std": 0.5,
              "correct": 2, "rollouts": 4, "rows": 5, "tool_calls": 2.25, "tokens": 10240, "trained_tokens": 300,
              "ratio_mean": 1.0001, "ratio_min": health.ratio_min, "ratio_max": health.ratio_max, "fresh_rows": 2,
              "fresh_ratio_mean": 0.99999, "staleness_mean": 0.5, "forks": 2,
              "skipped_groups": {"stale": 1, "ungraded": 2},
              "trl": {"entropy": 0.31, "perf/rollout_wait_s": 8.1, "perf/fwd_bwd_s": 3.0, "perf/weight_sync_s": None}}
    text = line(record)
    for part in ("step 7/30", "reward 0.520 ± 0.500 (2/4 correct)", "ratio 1.0001 [0.900, 1.100]",
                 "fresh 2/5 rows 0.99999", "entropy 0.310", "tools 2.2", "tokens 10240 (300 trained, 833/s)",
                 "skipped 3", "forks 2", "12.3 s (wait 8.1, train 3.0", "ETA 1h01m"):
        assert part in text, part


def test_without_a_token_budget_a_row_holds_so_many_sequences():
    group = [{"input_ids": [0] * n} for n in (5, 9, 1, 7, 3)]
    assert [[len(s["input_ids"]) for s in row] for row in pack(group, 0, 2)] == [[9, 7], [5, 3], [1]]
    assert [len(row) for row in pack(group, 0)] == [1] * 5
    assert [[len(s["input_ids"]) for s in row] for row in pack(group, 0, 4, 12)] == [[9, 3], [7, 5], [1]]
    assert [len(row) for row in pack(group, 0, 4, 2)] == [1] * 5, "a sequence beyond it has a row of its own"
