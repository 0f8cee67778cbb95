"""The small version of kill_watch.py: training and the watcher side by side, the watcher killed once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_double import HubDouble
from kill_watch import SideBySide


@pytest.mark.long
def test_the_curve_appears_beside_the_training_and_a_kill_changes_nothing(hub: HubDouble, folder: Path):
    both = SideBySide(hub, folder, steps=2, tasks=1, seed=1)
    both.run(kills=1)
    assert len(both.kept) == 1
