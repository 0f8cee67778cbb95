"""The small version of kill_often.py: a training that is killed once ends as one that never was."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_double import HubDouble
from kill_often import Campaign, Trainer, Violation

SEED = 5  # the kill comes behind the second of three steps, and the next life has an empty disk


@pytest.mark.long
def test_a_kill_loses_no_step_and_no_task(hub: HubDouble, tmp_path: Path, monkeypatch):
    import torch
    from lfm2_small import small_model
    from small_engine import SmallEngine

    monkeypatch.setattr(Trainer, "steps", 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for a busy core spin
    with SmallEngine(small_model()) as engine:
        engine.server.handle_error = lambda *_: None
        campaign = Campaign(Trainer(hub, engine.url), hub, tmp_path, seed=SEED)
        campaign.run_once("me/adapter", kills=1)
    torch.set_num_threads(threads)
    assert campaign.kills == 1 and campaign.lives == 2


def test_a_checkpoint_that_is_not_whole_would_be_seen(hub: HubDouble, tmp_path: Path):
    repo = hub.repo("me/adapter")
    repo.add("half", {"checkpoint-2/manifest.json": b'{"step": 2, "files": {"a": {"size": 1, "sha256": "0"}}}'})
    with pytest.raises(Violation, match="checkpoint-2/a is not whole"):
        Campaign(Trainer(hub, ""), hub, tmp_path, seed=0).newest_on_hub("me/adapter")


@pytest.mark.parametrize(("history", "wrong"), [
    ({1: 0, 2: 1}, "steps that count"), ({1: 0, 2: 1, 3: 1}, "trained twice"), ({1: 0, 2: 1, 3: 3}, "left out")])
def test_a_wrong_history_would_be_seen(hub: HubDouble, tmp_path: Path, monkeypatch, history, wrong):
    monkeypatch.setattr(Trainer, "steps", 3)
    files = {"manifest.json": b'{"step": 3, "files": {}}', "rollout_state.json": b'{"prompt_index": 3}',
             "task_cursor.json": b'{"trained_ahead": []}'}
    hub.repo("me/adapter").add("end", {f"checkpoint-3/{name}": content for name, content in files.items()})
    with pytest.raises(Violation, match=wrong):
        Campaign(Trainer(hub, ""), hub, tmp_path, seed=0).check_end("me/adapter", history, in_order=True)
