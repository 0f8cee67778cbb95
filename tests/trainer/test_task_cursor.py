"""The position in the tasks, over several resumes with groups that finish out of order."""

from __future__ import annotations

import itertools
import random

from recipe.task_cursor import ahead, check_shape, without


def test_trls_code_is_the_one_that_is_corrected():
    check_shape()


def test_groups_behind_the_first_untrained_one_are_named():
    assert ahead(set()) == ahead({0, 1, 2}) == []
    assert ahead({0, 2, 3, 7}) == [1, 2, 6]


def test_every_group_is_trained_once_over_any_number_of_resumes():
    dice = random.Random(1)
    for _ in range(50):
        start, trained_ahead, trained = 0, [], []
        for _ in range(4):  # as often as the run is broken off and resumed
            groups = without(zip(itertools.count(), itertools.count(start)), set(trained_ahead))
            done = set(trained_ahead)
            flying = [next(groups) for _ in range(4)]
            for _ in range(dice.randrange(12)):
                group, absolute = flying.pop(dice.randrange(len(flying)))
                done.add(group)
                trained.append(absolute)
                flying.append(next(groups))
            trained_ahead = ahead(done)
            start += next(g for g in itertools.count() if g not in done)
        assert len(set(trained)) == len(trained)
        assert set(trained) == set(range(start)) | {start + g for g in trained_ahead}
