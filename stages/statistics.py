"""95 % intervals of accuracies and of their differences."""

from __future__ import annotations

from collections.abc import Sequence
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


def wilson(correct: int, n: int) -> Accuracy:
    """Accuracy with Wilson's score interval, sound near 0 and 1 too (Wilson, JASA 22, 1927).

    Raises ValueError unless 0 <= correct <= n and n > 0.
    """
    if not (0 <= correct <= n and n > 0):
        raise ValueError(f"{correct} correct of {n} problems is no accuracy")
    return _interval(correct / n, n, n)


def of_problems(solved: Sequence[int], samples: int) -> Accuracy:
    """Accuracy on problems that were answered `samples` times each; `solved` has the right answers.

    Wilson's interval of as many single answers as would leave the mean over the problems with the
    variance that it has: at least one a problem, and at most all of them, which it is where answers
    to a problem are no more alike than those to others.
    """
    n = len(solved)
    share = sum(solved) / (n * samples)
    variance = sum((right / samples - share) ** 2 for right in solved) / max(n - 1, 1) / n
    alike = share * (1 - share) / variance if variance else n
    return _interval(share, min(max(alike, n), n * samples), n)


def _interval(share: float, answers: float, n: int) -> Accuracy:
    """Wilson's interval of `answers` independent answers to `n` problems."""
    shrink = 1 + Z_95**2 / answers
    centre = (share + Z_95**2 / (2 * answers)) / shrink
    spread = share * (1 - share) / answers + Z_95**2 / (4 * answers**2)
    half_width = Z_95 * sqrt(spread) / shrink
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
