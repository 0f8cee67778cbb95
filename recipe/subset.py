"""A smaller set of tasks that stands for the whole: each stratum in its share, the same in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def stratified(items: Sequence[Item], n: int, name: Callable[[Item], str], *strata: Callable[[Item], str],
               seed: int = 0) -> list[Item]:
    """`n` of `items`, in their order, chosen by the hash of seed and name alone.

    Shares are rounded by largest remainder in the first of `strata`, then within each of its values in the next, so
    that in each of these every value is within one item of its share. A choice does not depend on the order given, and
    a smaller one lies inside a larger one's strata. Raises ValueError when there are fewer than `n` items.
    """
    if n > len(items):
        raise ValueError(f"{n} are asked of {len(items)}")
    salt = f"{seed}/" if seed else ""
    by_hash = sorted(range(len(items)), key=lambda i: hashlib.sha256(f"{salt}{name(items[i])}".encode()).digest())
    return [items[i] for i in sorted(_choose(items, by_hash, n, strata))]


def _choose(items: Sequence[Item], order: Sequence[int], n: int, strata: Sequence[Callable[[Item], str]]) -> list[int]:
    """`n` of the indices in `order`, its first ones where there is no stratum left."""
    if not strata:
        return list(order[:n])
    groups: dict[str, list[int]] = {}
    for i in order:
        groups.setdefault(strata[0](items[i]), []).append(i)
    exact = {key: n * len(members) / len(order) for key, members in groups.items()}
    quota = {key: int(share) for key, share in exact.items()}
    by_remainder = sorted(groups, key=lambda key: (quota[key] - exact[key], key))
    for key in by_remainder[: n - sum(quota.values())]:
        quota[key] += 1
    return [i for key, members in groups.items() for i in _choose(items, members, quota[key], strata[1:])]
