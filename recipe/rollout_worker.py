"""TRL's rollout worker for agents that own their loop, with what the trainer must know about each row.

HarnessRolloutWorker runs the rollouts in a spawned process and queues training rows. This subclass adds

- to every row: its group's number of rows, the rollout's tool calls, how its turns joined, and the times of its first
  and last model call, so that the trainer knows which weights sampled it (recipe/sync_log.py);
- rows of ungraded rollouts are taken out (TRL keeps them with advantage 0, where they dilute the loss), and a group
  without a graded rollout sends one empty row, so that the trainer can count it instead of waiting in silence;
- every rollout, graded or not, gets a line in RUN_DIR/rollouts.jsonl (recipe/rollout_log.py);
- death of the child is noticed within seconds, and ends the trainer: TRL looks at a flag that a killed child never
  sets, and waits without end for a child that has failed.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    _chain_to_sequences,
)
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker, _HarnessRolloutLoop

from recipe import task_cursor
from recipe.exits import EXIT_UNAVAILABLE
from recipe.harbor_sessions import RolloutAborted
from recipe.rollout_log import RolloutLog
from recipe.trl_shape import expect_parameters, expect_source

GRACE = 30.0  # seconds for the trainer to end by itself after the worker's death
STOP_GRACE = 15.0  # seconds for the worker to end its rollouts when asked
ROW = "row/"  # prefix of the bookkeeping that travels in RolloutSample.metrics
# TRL's tally of a rollout's turns whose prompt is not what was held before it and sampled in it: those that were
# aligned again, those that began a row of their own, and by how many tokens they differed
DRIFT = ("realign", "fork", "drift_tokens")


class WorkerDied(RuntimeError):
    """The rollout worker's process ended although nobody asked it to."""


def check_shape() -> None:
    """Raises TrlShapeError when TRL's worker is not the one that the overrides below were written against."""
    expect_parameters(_HarnessRolloutLoop._run_session, ("self", "prompt", "group_id"))
    expect_parameters(_HarnessRolloutLoop._score_group, ("self", "group"))
    expect_parameters(AsyncRolloutWorker.check_health, ("self", "stale_after_s"))
    expect_source(_HarnessRolloutLoop._run_session, "self._factory.create(prompt, seed=seed, episode_id=rollout_id)")
    expect_source(_HarnessRolloutLoop._run_session, "sequences, tally = _chain_to_sequences(turns, rollout_id,",
                  "tally=tally,", "sequences, tool_call_count, tool_failure_count, reward), metrics")
    expect_source(_chain_to_sequences, *(f'"{name}": 0.0' for name in DRIFT))
    expect_source(_HarnessRolloutLoop._score_group, "for seq in sequences: samples.append(RolloutSample(")
    expect_source(_HarnessRolloutLoop._repeat_iterator, "yield group_id, row")
    expect_source(AsyncRolloutWorker.start, "self._process = self._mp_ctx.Process(target=_child_main,")
    expect_source(AsyncRolloutWorker.stop, "self._stop_event_mp.set()", "self._process.join(timeout=15)")


class KeepSession:
    """A session factory that remembers the session that the calling thread created last."""

    def __init__(self, factory: Any):
        self._factory, self._last = factory, threading.local()

    def create(self, *args: Any, **kwargs: Any) -> Any:
        self._last.session = None
        self._last.session = self._factory.create(*args, **kwargs)
        return self._last.session

    def call_times(self) -> tuple[float, float]:
        """That session's first and last model call in Unix seconds, NaN where it knows none."""
        return self._last.session.call_times or (math.nan, math.nan)

    def record(self) -> dict[str, Any]:
        """What that session says about its rollout."""
        session = self._last.session
        return session.record if session else {"reason": "no session could be made; see logs/train.log"}


def no_news(record: logging.LogRecord) -> bool:
    """A filter of TRL's log, which has a warning with a traceback for every rollout without a reward: none for those
    that the end of the run ended. rollouts.jsonl names them."""
    return not (record.exc_info and isinstance(record.exc_info[1], RolloutAborted))


class RolloutLoop(_HarnessRolloutLoop):
    """Runs in the child."""

    def __init__(self, trained_ahead: Sequence[int] = (), rollout_log: Path | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        logging.getLogger(_HarnessRolloutLoop.__module__).addFilter(no_news)
        self._log = RolloutLog(rollout_log)
        self._trained_ahead = set(trained_ahead)  # groups that the checkpoint has trained already
        self._factory = KeepSession(self._factory)
        self._known: dict[str, dict[str, float]] = {}  # rollout id -> bookkeeping of its rows
        threading.Thread(target=_end_with_parent, daemon=True).start()

    def _run_session(self, prompt: Any, group_id: int = 0) -> Any:
        result, metrics = super()._run_session(prompt, group_id)
        for sequence in result[2][:1]:
            first, last = self._factory.call_times()
            self._known[sequence.rollout_id] = {ROW + "first_call": first, ROW + "last_call": last} | {
                ROW + name: metrics["tally"][name] for name in DRIFT}
        self._log.add(group_id, result[5], result[3], self._factory.record())
        return result, metrics

    def _repeat_iterator(self) -> Any:
        return task_cursor.without(super()._repeat_iterator(), self._trained_ahead)

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        rollouts = [(i, seq) for i, sequences in enumerate(group.completions_sequences) for seq in sequences]
        known = {rollout_id: self._known.pop(rollout_id) for rollout_id in {seq.rollout_id for _, seq in rollouts}}
        for sample, (i, seq) in zip(samples, rollouts, strict=True):
            sample.metrics |= known[seq.rollout_id] | {
                ROW + "rollout": float(i), ROW + "tool_calls": float(group.tool_call_counts[i])}
        kept = [sample for sample in samples if not math.isnan(sample.metrics["reward"])]
        # A rollout none of whose turns carries loss has a part in its group's baseline and no row.
        rowless = [reward for reward, sequences in zip(group.rollout_rewards, group.completions_sequences, strict=True)
                   if reward is not None and not sequences]
        if not kept:
            kept = [RolloutSample(prompt=group.prompts[0], completion=[], input_ids=[], completion_mask=[],
                                  old_log_probs=[], advantage=0.0, model_version=group.model_version,
                                  group_id=group.group_id, metrics={"reward": math.nan})]
        for sample in kept:
            sample.metrics |= {ROW + "rows": float(len(kept)), ROW + "rowless": rowless,
                               ROW + "rollouts": float(len(group.completions))}
        return kept


def _end_with_parent() -> None:
    """Ends this child when the trainer is gone: a killed trainer cannot ask for it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(EXIT_UNAVAILABLE)


class RolloutWorker(HarnessRolloutWorker):
    """The trainer's handle on the child; same arguments as HarnessRolloutWorker."""

    _loop_cls = RolloutLoop

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._stopped = threading.Event()
        self.ending = False  # the trainer knows that the child has ended or will, and may still be saving

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()

    def stop(self) -> None:
        """Ends the child: by request, then by force. Replaces TRL's method, which never returns once the child has
        failed: Event.set() waits for the answer of every process that waited for the event, dead ones included."""
        process, self._process = self._process, None
        if process is not None and process.pid is not None:
            threading.Thread(target=self._stop_event_mp.set, daemon=True).start()
            for grace, force in ((STOP_GRACE, process.terminate), (5.0, process.kill), (5.0, None)):
                process.join(timeout=grace)
                if not process.is_alive() or force is None:
                    break
                print(f"The rollout worker (pid {process.pid}) did not end within {grace:.0f} s; "
                      f"{force.__name__} is sent.", file=sys.stderr, flush=True)
                force()
        self._stopped.set()

    def check_health(self, stale_after_s: float) -> None:
        try:
            if self._process is not None and not self._process.is_alive() and not self._failed_event.is_set():
                raise WorkerDied(self._obituary(self._process))
            super().check_health(stale_after_s)
        except RuntimeError:
            self.ending = True
            raise

    @staticmethod
    def _obituary(process: Any) -> str:
        code = process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return f"The rollout worker (pid {process.pid}, child of the trainer) {how}; see logs/train.log."

    def _watch(self, process: Any) -> None:
        """Ends the trainer when the child dies and the main thread, busy or stuck in its queue, does not notice."""
        multiprocessing.connection.wait([process.sentinel])
        if not self._stopped.wait(GRACE + STOP_GRACE) and not self.ending:
            print(f"{self._obituary(process)} The trainer did not notice and is stopped.",
                  file=sys.stderr, flush=True)
            os._exit(EXIT_UNAVAILABLE)
