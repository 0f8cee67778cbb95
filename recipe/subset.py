"""A smaller set of tasks that stands for the whole: each stratum in its share, the same in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def stratified(items: Sequence[Item], n: int, name: Callable[[Item], str], stratum: Callable[[Item], Hashable],
               seed: int = 0) -> list[Item]:
    """`n` of `items`, in their order, chosen by the hash of seed and name alone.

    So a choice does not depend on the order given, and a smaller one lies inside a larger one's strata. Shares are
    rounded by largest remainder; raises ValueError when there are fewer than `n` items.
    """
    if n > len(items):
        raise ValueError(f"{n} are asked of {len(items)}")
    salt = f"{seed}/" if seed else ""
    strata: dict[Hashable, list[int]] = {}
    for i in sorted(range(len(items)), key=lambda i: hashlib.sha256(f"{salt}{name(items[i])}".encode()).digest()):
        strata.setdefault(stratum(items[i]), []).append(i)
    exact = {key: n * len(members) / len(items) for key, members in strata.items()}
    quota = {key: int(share) for key, share in exact.items()}
    by_remainder = sorted(strata, key=lambda key: (quota[key] - exact[key], key))
    for key in by_remainder[: n - sum(quota.values())]:
        quota[key] += 1
    return [items[i] for i in sorted(i for key, members in strata.items() for i in members[: quota[key]])]
