"""What stays of a finished rollout: everything but the agent's database."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from openenv.harbor.models import HarborRolloutResult

from recipe import trial_files
from recipe.call_times import CallTimes
from recipe.seams import observed_rollout

KEPT = {"result.json", "config.json", "trial.log", "agent/opencode.txt", "agent/trajectory.json",
        "verifier/reward.txt", "verifier/test-stdout.txt", "artifacts/manifest.json",
        "agent/opencode/xdg-data/opencode/log/opencode.log"}
STATE = {"agent/opencode/xdg-data/opencode/opencode.db", "agent/opencode/xdg-data/opencode/opencode.db-wal",
         "agent/opencode/xdg-state/opencode/locks/1.lock/meta.json", "agent/opencode/xdg-cache/models.json"}


@pytest.fixture
def trial(tmp_path) -> Path:
    folder = tmp_path / "trials" / "oe-task-1"
    for name in KEPT | STATE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x" * 10)
    return folder


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()}


def test_the_agents_state_goes_and_what_is_read_stays(trial):
    assert trial_files.prune(trial) == 10 * len(STATE)
    assert names(trial) == KEPT
    assert not (trial / "agent/opencode/xdg-state").exists(), "empty folders stayed"
    assert trial_files.prune(trial) == 0


def test_links_of_the_agent_are_not_followed(trial, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (trial / "agent/opencode/xdg-data/link").symlink_to(outside)
    trial_files.prune(trial)
    assert names(trial) == KEPT and (outside / "precious").exists()

    other = trial.parent / "oe-task-2"
    (other / "agent").mkdir(parents=True)
    (other / "agent/opencode").symlink_to(outside)
    assert trial_files.prune(other) == 0 and (outside / "precious").exists()


def test_a_trial_without_agent_or_folder_is_no_error(tmp_path, caplog):
    (tmp_path / "t").mkdir()
    with caplog.at_level(logging.WARNING):
        assert trial_files.prune(tmp_path / "t") == trial_files.prune(tmp_path / "gone") == 0
    assert not caplog.records


def test_what_cannot_be_removed_is_a_warning(trial, monkeypatch, caplog):
    def refuse(self):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.WARNING):
        trial_files.prune(trial)
    assert "oe-task-1 was not removed: read-only file system" in caplog.text


@pytest.mark.parametrize(("keep", "left"), [("lean", KEPT), ("full", KEPT | STATE)])
def test_every_rollout_is_pruned_by_the_setting(trial, keep, left):
    async def stock(*, on_session_created, trials_dir):
        return HarborRolloutResult(trial_name=trial.name)

    asyncio.run(observed_rollout(stock, CallTimes(), keep)(trials_dir=str(trial.parent)))
    assert names(trial) == left


def test_a_rollout_that_never_became_a_trial_prunes_nothing(trial):
    async def stock(*, on_session_created, trials_dir):
        return HarborRolloutResult(ok=False, error="unknown harness")

    # With an empty name the folder of all trials would be taken for the trial.
    asyncio.run(observed_rollout(stock, CallTimes(), "lean")(trials_dir=str(trial)))
    assert names(trial) == KEPT | STATE
