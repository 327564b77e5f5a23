"""95 % intervals of accuracies and of their differences."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

Z_95 = 1.959963984540054  # the standard normal's 97.5 % quantile


@dataclass(frozen=True)
class Accuracy:
    """A share of `n` problems answered correctly, with its 95 % interval; all within [0, 1]."""

    accuracy: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """A difference of two accuracies with its 95 % interval; all within [-1, 1]."""

    difference: float
    low: float
    high: float


def wilson(correct: int, n: int) -> Accuracy:
    """Accuracy with Wilson's score interval, sound near 0 and 1 too (Wilson, JASA 22, 1927).

    Raises ValueError unless 0 <= correct <= n and n > 0.
    """
    if not (0 <= correct <= n and n > 0):
        raise ValueError(f"{correct} correct of {n} problems is no accuracy")
    share = correct / n
    shrink = 1 + Z_95**2 / n
    centre = (share + Z_95**2 / (2 * n)) / shrink
    half_width = Z_95 * sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2)) / shrink
    return Accuracy(share, max(0.0, centre - half_width), min(1.0, centre + half_width), n)


def difference(after: Accuracy, before: Accuracy) -> Difference:
    """after - before, for independent samples, from the two Wilson intervals.

    Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10).
    """
    gain = after.accuracy - before.accuracy
    down = sqrt((after.accuracy - after.low) ** 2 + (before.high - before.accuracy) ** 2)
    up = sqrt((after.high - after.accuracy) ** 2 + (before.accuracy - before.low) ** 2)
    return Difference(gain, gain - down, gain + up)
