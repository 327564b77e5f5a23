"""The interval that a paired one is compared with: of two models as if on different problems."""

from math import hypot

from stages.statistics import Accuracy, Difference, _interval


def wilson(correct: int, n: int) -> Accuracy:
    """Return the accuracy of n independent answers with Wilson's score interval."""
    return _interval(correct / n, n, n)


def unpaired(after: Accuracy, before: Accuracy, share: float = 1.0) -> Difference:
    """Return after - share * before, for independent samples, from the two Wilson intervals.

    Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, pp. 873-890, method 10),
    extended to linear combinations by Zou and Donner (Statistics in Medicine 27, 2008).
    """
    gain = after.accuracy - share * before.accuracy
    above, below = before.high - before.accuracy, before.accuracy - before.low
    down = hypot(after.accuracy - after.low, share * above)
    up = hypot(after.high - after.accuracy, share * below)
    return Difference(gain, gain - down, gain + up)
