"""95 % intervals of accuracies and of their differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, hypot, sqrt

Z_95 = 1.959963984540054  # the standard normal's 97.5 % quantile


@dataclass(frozen=True)
class Accuracy:
    """The share of `n` problems answered correctly, with its 95 % interval; all within [0, 1]."""

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
    """Return the accuracy with Wilson's score interval (JASA 22, 1927), valid near 0 and 1 too.

    Raises:
        ValueError: not 0 <= correct <= n, or n is 0.
    """
    if not (0 <= correct <= n and n > 0):
        raise ValueError(f"no accuracy: {correct} correct answers to {n} problems")
    return _interval(correct / n, n, n)


def of_problems(solved: Sequence[int], samples: int) -> Accuracy:
    """Return the accuracy on problems that were answered `samples` times each.

    `solved` has the number of correct answers to each. The interval is Wilson's for the effective
    number of independent answers, p (1 - p) over the variance of the mean over problems: from one
    per problem, where all answers to a problem are equal, to all answers, where they are
    independent.
    """
    n = len(solved)
    share = sum(solved) / (n * samples)
    variance = sum((right / samples - share) ** 2 for right in solved) / max(n - 1, 1) / n
    alike = share * (1 - share) / variance if variance else n
    return _interval(share, min(max(alike, n), n * samples), n)


def _interval(share: float, answers: float, n: int) -> Accuracy:
    """Return the accuracy `share` with Wilson's interval for `answers` independent answers."""
    shrink = 1 + Z_95**2 / answers
    centre = (share + Z_95**2 / (2 * answers)) / shrink
    spread = share * (1 - share) / answers + Z_95**2 / (4 * answers**2)
    half_width = Z_95 * sqrt(spread) / shrink
    return Accuracy(share, max(0.0, centre - half_width), min(1.0, centre + half_width), n)


def difference(after: Accuracy, before: Accuracy, share: float = 1.0) -> Difference:
    """Return after - share * before, for independent samples, from the two Wilson intervals.

    Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10), extended to
    linear combinations by Zou and Donner (Statistics in Medicine 27, 2008). It is conservative for
    two models that answered the same problems.
    """
    gain = after.accuracy - share * before.accuracy
    above, below = before.high - before.accuracy, before.accuracy - before.low
    down = hypot(after.accuracy - after.low, share * above)
    up = hypot(after.high - after.accuracy, share * below)
    return Difference(gain, gain - down, gain + up)


def paired_difference(after: Sequence[int], before: Sequence[int], samples: int = 1) -> Difference:
    """Return after - before, of two models that answered the same problems `samples` times each.

    Both have the number of correct answers to each problem. The interval is that of Agresti and
    Min (Statistics in Medicine 24, 2005): the normal one after adding half a problem to each of the
    four outcomes, so that two models that differ on no problem are still not shown to be equal.

    Raises:
        ValueError: there are no problems, or not equally many.
    """
    each = [(one - other) / samples for one, other in zip(after, before, strict=True)]
    if not each:
        raise ValueError("no difference: there are no problems")
    total, n = fsum(each), len(each) + 2
    centre = total / n
    half_width = Z_95 * sqrt(fsum(one * one for one in each) + 1 - total * centre) / n
    low, high = max(-1.0, centre - half_width), min(1.0, centre + half_width)
    return Difference(total / len(each), low, high)
