"""Which checkpoints are kept; never imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping


def kept(scores: Mapping[int, float | None], last: int, best: int) -> set[int]:
    """The steps to keep of `scores`: the `last` newest, and the `best` with the highest scores.

    A step without a score, or with NaN for one, is never among the best; of two equal ones the
    newer is. `last` is at least 1.
    """
    newest = sorted(scores)[-last:]
    comparable = {
        step: score for step, score in scores.items() if score is not None and not math.isnan(score)
    }
    ranked = sorted(comparable, key=lambda step: (comparable[step], step), reverse=True)
    return {*newest, *ranked[:best]}
