"""Retention keeps the newest and the best checkpoints, for any scores."""

from __future__ import annotations

import math
from random import Random

import pytest

from parallel.checkpoint.save import kept

NAN = math.nan


@pytest.mark.parametrize(
    ("scores", "last", "best", "expected"),
    [
        ({}, 2, 2, set()),
        ({5: None}, 1, 0, {5}),
        ({1: 0.9, 2: 0.1, 3: 0.5, 4: 0.2}, 1, 0, {4}),
        ({1: 0.9, 2: 0.1, 3: 0.5, 4: 0.2}, 2, 1, {1, 3, 4}),
        ({1: 0.9, 2: 0.1, 3: 0.5, 4: 0.2}, 1, 2, {1, 3, 4}),
        ({9: 0.1, 10: 0.9}, 1, 1, {10}),  # the last is the best
        ({1: 0.5, 2: 0.5, 3: 0.1}, 1, 1, {2, 3}),  # of two equal ones the newer
        ({1: NAN, 2: 0.1, 3: NAN, 4: None}, 1, 2, {2, 4}),
        ({1: -math.inf, 2: NAN, 3: NAN}, 1, 1, {1, 3}),
        ({1: -2.0, 2: -1.0, 3: -3.0}, 1, 1, {2, 3}),
    ],
)
def test_the_newest_and_the_best(
    scores: dict[int, float | None], last: int, best: int, expected: set[int]
) -> None:
    assert kept(scores, last, best) == expected


def test_it_holds_for_any_scores() -> None:
    draw = Random(0)
    for _ in range(2000):
        steps = draw.sample(range(100), draw.randint(1, 12))
        scores = {step: draw.choice([None, NAN, draw.random(), 0.5]) for step in steps}
        last, best = draw.randint(1, 4), draw.randint(0, 4)
        found = kept(scores, last, best)
        newest = sorted(steps)[-last:]
        assert set(newest) <= found <= set(steps)
        chosen = found - set(newest)
        assert len(chosen) <= best
        for step in chosen:  # only for its score, which nothing that is dropped exceeds
            score = scores[step]
            assert score is not None and not math.isnan(score)
            dropped = [scores[other] for other in steps if other not in found]
            assert not any(other is not None and other > score for other in dropped)


def test_a_dropped_checkpoint_is_never_wanted_later() -> None:
    """Pruning after every save keeps the best of all checkpoints until the end."""
    draw = Random(1)
    for _ in range(200):
        scores = {step: draw.choice([None, NAN, draw.random()]) for step in range(30)}
        left: dict[int, float | None] = {}
        for step, score in scores.items():
            left[step] = score
            left = {step: left[step] for step in kept(left, 2, 3)}
        assert left.keys() == kept(scores, 2, 3)
