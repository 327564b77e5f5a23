"""95 % intervals of accuracies and of their differences."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, sqrt

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


def wilson(correct: float, n: int) -> Accuracy:
    """Accuracy with Wilson's score interval, sound near 0 and 1 too (Wilson, JASA 22, 1927).

    A problem that was answered several times counts by the share of its answers that are right.
    Those vary less than one answer would, so that the interval errs on the wide side.

    Raises ValueError unless 0 <= correct <= n and n > 0.
    """
    if not (0 <= correct <= n and n > 0):
        raise ValueError(f"{correct} correct of {n} problems is no accuracy")
    share = correct / n
    shrink = 1 + Z_95**2 / n
    centre = (share + Z_95**2 / (2 * n)) / shrink
    half_width = Z_95 * sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2)) / shrink
    return Accuracy(share, max(0.0, centre - half_width), min(1.0, centre + half_width), n)


def difference(after: Accuracy, before: Accuracy, share: float = 1.0) -> Difference:
    """after - share * before, for independent samples, from the two Wilson intervals.

    Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10); with a share as
    Zou and Donner have it for any linear combination (Statistics in Medicine 27, 2008). Models that
    answered the same problems differ by less than it allows for: it errs on the wide side.
    """
    gain = after.accuracy - share * before.accuracy
    above, below = before.high - before.accuracy, before.accuracy - before.low
    down = hypot(after.accuracy - after.low, share * above)
    up = hypot(after.high - after.accuracy, share * below)
    return Difference(gain, gain - down, gain + up)
