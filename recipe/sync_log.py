"""Which weights the engine held when: the trainer's record of its syncs.

A sync pauses the engine between two tokens, replaces the weights and resumes. Requests that arrive while it is paused
wait, so they belong to the new weights from their first token on; a request that runs is continued, half old half new.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass
class SyncLog:
    """Times in Unix seconds, ascending."""

    asked: list[float] = field(default_factory=list)  # a pause was requested: what runs later may end on new weights
    paused: list[float] = field(default_factory=list)  # it was confirmed: what arrives later runs on new weights only
    versions: list[int] = field(default_factory=list)  # of the weights that followed

    def add(self, asked: float, paused: float, version: int) -> None:
        """One finished sync."""
        self.asked.append(asked)
        self.paused.append(paused)
        self.versions.append(version)

    def versions_between(self, first: float, last: float) -> tuple[int, int] | None:
        """Versions that may have sampled at the arrival (`first`) and at the end (`last`) of a rollout's model calls.

        They are equal only if one version sampled all of it. None: the rollout began before the first sync, or its
        times are not known (NaN).
        """
        if not first <= last or not self.paused or first < self.paused[0]:
            return None
        return (self.versions[bisect_right(self.paused, first) - 1], self.versions[bisect_right(self.asked, last) - 1])
