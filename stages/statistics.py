"""95 % intervals of accuracies, their differences, recovered headroom, and of a series' rise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, log1p, sqrt
from statistics import fmean, pvariance

Z_95 = 1.959963984540054  # the standard normal's 97.5 % quantile
LEAST_STEPS = 10  # of a series, before its rise is more than noise


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
    """Return the accuracy `share` with Wilson's interval for `answers` independent answers.

    Wilson's score interval (JASA 22, 1927) is valid near 0 and 1 too.
    """
    shrink = 1 + Z_95**2 / answers
    centre = (share + Z_95**2 / (2 * answers)) / shrink
    spread = share * (1 - share) / answers + Z_95**2 / (4 * answers**2)
    half_width = Z_95 * sqrt(spread) / shrink
    return Accuracy(share, max(0.0, centre - half_width), min(1.0, centre + half_width), n)


@dataclass(frozen=True)
class Answers:
    """The number of right answers to each problem, of `samples` answers to each."""

    right: Sequence[int]
    samples: int = 1

    @property
    def shares(self) -> list[float]:
        """The share of right answers to each problem."""
        return [right / self.samples for right in self.right]

    @property
    def accuracy(self) -> Accuracy:
        """The accuracy, with the interval of `of_problems`."""
        return of_problems(self.right, self.samples)


def paired_difference(after: Answers, before: Answers, share: float = 1.0) -> Difference:
    """Return after - share * before of models that answered the same problems, in the same order.

    Newcombe's hybrid score interval for paired data (Statistics in Medicine 17, 1998, pp.
    2635-2650, method 10): the two Wilson intervals, less the correlation of the two accuracies.
    Wald's interval, from McNemar's variance, has no width where no answer differs, and covers too
    rarely with few problems or near 0 and 1. With several answers to a problem the correlation is
    of the shares of right answers; it and `share` enter as Zou and Donner (Statistics in Medicine
    27, 2008) combine any two intervals.
    """
    one, other = after.accuracy, before.accuracy
    correlation = _corrected_correlation(after, before)

    def beyond(width: float, other_width: float) -> float:
        square = width**2 + other_width**2 - 2 * correlation * width * other_width
        return sqrt(max(square, 0.0))  # rounding may leave it below 0

    gain = one.accuracy - share * other.accuracy
    down = beyond(one.accuracy - one.low, share * (other.high - other.accuracy))
    up = beyond(one.high - one.accuracy, share * (other.accuracy - other.low))
    return Difference(gain, gain - down, gain + up)


def _corrected_correlation(one: Answers, other: Answers) -> float:
    """Return the correlation over problems, corrected for continuity where it is above 0.

    The correction is half of the step by which n * sum(x y) can change; with one answer to each
    problem that is Newcombe's n / 2. Without it equal answers would leave no uncertainty.
    """
    n = len(one.right)
    spread = sqrt(pvariance(one.shares) * pvariance(other.shares))
    if not spread:
        return 0.0
    half_step = 1 / (2 * n * one.samples * other.samples)
    covariance = _covariance(one.shares, other.shares)
    return (covariance if covariance < 0 else max(covariance - half_step, 0.0)) / spread


@dataclass(frozen=True)
class Headroom:
    """The share of an expert's gain that a model has: 0 is the start, 1 the expert."""

    recovered: float
    low: float
    high: float


def recovered_headroom(model: Answers, start: Answers, expert: Answers) -> Headroom | None:
    """Return (model - start) / (expert - start) on the same problems, with its 95 % interval.

    None where the expert gained nothing significant: the ratio would be one of noise.

    The interval is Fieller's (JRSS B 16, 1954): the shares h for which the mean over problems of
    model - start - h (expert - start) is within 1.96 standard errors of 0. It needs no seed, as a
    bootstrap would, keeps the three models' correlations over problems, and has two ends exactly
    where the denominator differs from 0 by more than 1.96 standard errors.
    """
    if len(start.right) < 2 or paired_difference(expert, start).low <= 0:
        return None
    gained = [one - other for one, other in zip(model.shares, start.shares, strict=True)]
    possible = [one - other for one, other in zip(expert.shares, start.shares, strict=True)]
    top, bottom = fmean(gained), fmean(possible)
    # Variances of the two means, with n - 1, times the square of the quantile.
    scale = Z_95**2 / (len(gained) - 1)
    square = bottom**2 - scale * _covariance(possible, possible)
    if square <= 0:
        return None
    linear = top * bottom - scale * _covariance(gained, possible)
    constant = top**2 - scale * _covariance(gained, gained)
    root = sqrt(max(linear**2 - square * constant, 0.0))
    return Headroom(top / bottom, (linear - root) / square, (linear + root) / square)


def mean_headroom(headrooms: Sequence[Headroom]) -> Headroom:
    """Return the mean over domains, whose problems are independent (Zou and Donner, 2008)."""
    mean = fmean(headroom.recovered for headroom in headrooms)
    down = hypot(*(headroom.recovered - headroom.low for headroom in headrooms)) / len(headrooms)
    up = hypot(*(headroom.high - headroom.recovered for headroom in headrooms)) / len(headrooms)
    return Headroom(mean, mean - down, mean + up)


@dataclass(frozen=True)
class Rise:
    """The rise of a noisy series, from the `first` to the `last` value of a curve fitted to it.

    `low` and `high` are the ends of the 95 % interval of last - first.
    """

    first: float
    last: float
    low: float
    high: float


def fitted_rise(values: Sequence[float]) -> Rise | None:
    """Return the rise of a series from its first value to its last; None of fewer than LEAST_STEPS.

    A least-squares fit on the step or on its logarithm, log(1 + 20 t / n), whichever leaves less:
    a reward that rises soon and then stays has risen. The interval is Student's, for the number of
    independent residuals n (1 - r) / (1 + r) where neighbours correlate by r (Santer et al., JGR
    105(D6), 2000, pp. 7337-7356, section 3), r corrected for its bias by (1 + 4 r) / n (Marriott
    and Pope, Biometrika 41, 1954). Of 1,500 series without a trend 3 % are said to rise where
    neighbours are independent (nominal: 2.5 %); with r = .5, 8 % of 10 steps, 5 % of 20 and 40,
    3 % of 100 and more.

    Example:
        >>> rise = fitted_rise([0.1, 0.3, 0.2, 0.4, 0.3, 0.5, 0.4, 0.6, 0.5, 0.7])
        >>> rise.low > 0
        True
    """
    n = len(values)
    if n < LEAST_STEPS:
        return None
    if min(values) == max(values):  # whose fits have slopes of rounding alone
        return Rise(values[0], values[0], 0.0, 0.0)
    steps = [float(step) for step in range(n)]
    line, curve = (_fit(x, values) for x in (steps, [log1p(20 * step / n) for step in steps]))
    fit = min(line, curve, key=lambda fit: fit.squares)
    independent = n * (1 - fit.correlation) / (1 + fit.correlation)
    degrees = max(independent - 2, 2.0)
    half = _student_95(degrees) * sqrt(fit.squares / degrees / fit.spread) * fit.span
    rise = fit.slope * fit.span
    return Rise(fit.first, fit.first + rise, rise - half, rise + half)


@dataclass(frozen=True)
class _Fit:
    """A line through a series: its residuals' `squares`, `correlation` of neighbouring residuals.

    `spread` is the sum of squares of x around its mean, `span` the last x less the first.
    """

    first: float
    slope: float
    squares: float
    correlation: float
    spread: float
    span: float


def _fit(x: Sequence[float], y: Sequence[float]) -> _Fit:
    n, centre, level = len(x), fmean(x), fmean(y)
    spread = sum((at - centre) ** 2 for at in x)
    slope = sum((at - centre) * value for at, value in zip(x, y, strict=True)) / spread
    residuals = [value - level - slope * (at - centre) for at, value in zip(x, y, strict=True)]
    squares = sum(residual**2 for residual in residuals)
    products = sum(before * after for before, after in pairwise(residuals))
    correlation = products / squares if squares else 0.0
    correlation += (1 + 4 * max(correlation, 0.0)) / n
    first = level + slope * (x[0] - centre)
    return _Fit(first, slope, squares, min(max(correlation, 0.0), 0.95), spread, x[-1] - x[0])


def _student_95(degrees: float) -> float:
    """Return Student's 97.5 % quantile, to 2 % from two degrees of freedom (Fisher and Cornish)."""
    z = Z_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def _covariance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the covariance with n in its denominator."""
    centre, around = fmean(one), fmean(other)
    return fmean((x - centre) * (y - around) for x, y in zip(one, other, strict=True))
