"""Intervals against the worked examples of Newcombe, Statistics in Medicine 17 (1998)."""

from itertools import product
from math import factorial, prod
from statistics import NormalDist, stdev

import numpy as np
import pytest

from stages.statistics import (
    Answers,
    Headroom,
    Rise,
    fitted_rise,
    mean_headroom,
    of_problems,
    paired_difference,
    recovered_headroom,
)
from tests.runs import REPOSITORY
from tests.stages.unpaired import unpaired, wilson


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson(correct: int, n: int, low: float, high: float) -> None:
    interval = wilson(correct, n)
    assert interval.accuracy == correct / n
    assert interval.n == n
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert 0 <= interval.low <= interval.accuracy <= interval.high <= 1


@pytest.mark.parametrize(
    ("after", "before", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 10), 0.6075, 1.0),
        ((0, 10), (0, 10), -0.2775, 0.2775),
    ],
)
def test_unpaired(after: tuple[int, int], before: tuple[int, int], low: float, high: float) -> None:
    gain = unpaired(wilson(*after), wilson(*before))
    assert gain.difference == pytest.approx(after[0] / after[1] - before[0] / before[1])
    assert (gain.low, gain.high) == pytest.approx((low, high), abs=5e-5)


def test_several_responses_to_a_problem_narrow_the_interval_as_far_as_they_differ() -> None:
    single = [1] * 30 + [0] * 70
    assert of_problems(single, 1).low == pytest.approx(wilson(30, 100).low, abs=2e-3)
    # All four answers to a problem alike: they say no more than one.
    alike = of_problems([4 * right for right in single], 4)
    assert (alike.accuracy, alike.n) == (0.3, 100)
    assert (alike.low, alike.high) == pytest.approx((wilson(30, 100).low, wilson(30, 100).high))
    # The mean over problems, whose shares are .25 and .5, has less variance than single answers.
    mixed = [1] * 80 + [2] * 20
    spread = stdev([right / 4 for right in mixed]) / 10
    found = of_problems(mixed, 4)
    assert found.accuracy == pytest.approx(0.3)
    assert wilson(120, 400).high - wilson(120, 400).low == pytest.approx(found.high - found.low)
    assert found.high - found.low > 2 * 1.96 * spread  # never more than all of them
    for none_or_all in ([0] * 50, [4] * 50):
        assert of_problems(none_or_all, 4).high - of_problems(none_or_all, 4).low > 0.05


def test_intervals_of_learning_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paired over problems, and Student's t over seeds."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from intervals import over_seeds, paired

    # Of 1,000 problems 60 are solved by one model alone, 40 by the other: McNemar's variance.
    after, before = [1] * 60 + [0] * 40 + [1] * 900, [0] * 60 + [1] * 40 + [1] * 900
    gain = paired(after, before)
    assert gain.difference == pytest.approx(0.02)
    half = 1.959964 * (0.1 - 0.02**2) ** 0.5 / 999**0.5
    assert (gain.low, gain.high) == pytest.approx((0.02 - half, 0.02 + half), abs=1e-6)
    values = [1.0, 2.0, 4.0, 3.0, 5.0]
    assert over_seeds(values) == f"+3.0 ± {2.776 * stdev(values) / 5**0.5:.1f}"
    assert over_seeds([0.9, 1.1], ".3f") == "1.000 ± 1.271"
    assert over_seeds([2.0]) == "+2.0"


def paired(both: int, first: int, second: int, neither: int) -> tuple[Answers, Answers]:
    """Return the answers of two models: `both` problems are solved by both, `first` by the one."""
    one = [1] * (both + first) + [0] * (second + neither)
    other = [1] * both + [0] * first + [1] * second + [0] * neither
    return Answers(one), Answers(other)


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [((20, 12, 2, 16), 0.0562, 0.3292), ((36, 12, 2, 0), 0.0569, 0.3404)],
)
def test_paired_difference(table: tuple[int, int, int, int], low: float, high: float) -> None:
    """Values of method 10 for two tables of Newcombe's second paper of 1998."""
    gain = paired_difference(*paired(*table))
    assert gain.difference == pytest.approx(0.2)
    assert (gain.low, gain.high) == pytest.approx((low, high), abs=5e-5)


def test_a_paired_interval_nears_mcnemars_and_covers_where_that_does_not() -> None:
    wide = paired_difference(*paired(400, 150, 90, 360))
    half = 1.959964 * (0.24 - 0.06**2) ** 0.5 / 1000**0.5
    assert wide.high - wide.low == pytest.approx(2 * half, rel=0.01)
    apart = unpaired(wilson(550, 1000), wilson(490, 1000))
    assert wide.high - wide.low < 0.9 * (apart.high - apart.low)
    # Exact coverage by enumeration of all tables of 15 problems; Wald's has 0.70 here.
    n, shares = 15, (0.85, 0.05, 0.02, 0.08)
    covered = wald = 0.0
    for table in product(range(n + 1), repeat=3):
        if (neither := n - sum(table)) < 0:
            continue
        counts = (*table, neither)
        chance = factorial(n) * prod(
            share**count / factorial(count) for share, count in zip(shares, counts, strict=True)
        )
        gain = paired_difference(*paired(*counts))
        covered += chance * (gain.low <= 0.03 <= gain.high)
        spread = (table[1] + table[2]) / n - gain.difference**2
        wald += chance * (abs(gain.difference - 0.03) <= 1.96 * (spread / n) ** 0.5)
    assert wald < 0.8
    assert covered > 0.95


def test_equal_answers_leave_uncertainty_and_opposite_ones_more_than_independent_ones() -> None:
    same = paired_difference(*paired(30, 0, 0, 20))
    assert same.low < 0 < same.high
    opposite = paired_difference(*paired(0, 25, 25, 0))
    independent = unpaired(wilson(25, 50), wilson(25, 50))
    assert opposite.high > independent.high
    assert paired_difference(*paired(50, 0, 0, 0)).low < 0  # no spread, no correlation


@pytest.mark.parametrize("table", [(0, 0, 0, 9), (0, 5, 7, 0), (40, 12, 3, 45), (20, 30, 30, 20)])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
def test_a_share_of_the_other_is_subtracted(table: tuple[int, int, int, int], share: float) -> None:
    one, other = paired(*table)
    found = paired_difference(one, other, share)
    before = other.accuracy.accuracy
    assert found.difference == pytest.approx(one.accuracy.accuracy - share * before)
    assert found.low <= found.difference <= found.high
    assert paired_difference(one, other, 1.0) == paired_difference(one, other)
    alone = paired_difference(one, other, 0.0)
    assert (alone.low, alone.high) == pytest.approx((one.accuracy.low, one.accuracy.high))


def test_a_share_keeps_the_correlation_of_the_pairs() -> None:
    """By the definition, from the moments of the answers."""
    one, other = paired(40, 12, 3, 45)
    x, y = np.array(one.right), np.array(other.right)
    correlation = (np.cov(x, y, ddof=0)[0, 1] - 1 / 200) / (x.std() * y.std())
    left, right = one.accuracy.accuracy - one.accuracy.low, other.accuracy.high - y.mean()
    square = left**2 + (0.9 * right) ** 2 - 2 * correlation * left * 0.9 * right
    found = paired_difference(one, other, 0.9)
    assert found.difference - found.low == pytest.approx(square**0.5)


def test_a_correlation_below_its_correction_counts_as_none() -> None:
    weak = paired_difference(*paired(2, 2, 2, 4))  # a covariance of 0.04; the correction is 0.05
    independent = unpaired(wilson(4, 10), wilson(4, 10))
    assert (weak.low, weak.high) == pytest.approx((independent.low, independent.high))


def test_several_answers_to_a_problem_need_less_correction() -> None:
    """By the definition: n sum(x y) of shares changes in steps of 1 / 16 with 4 answers each."""
    one, other = Answers([4, 3, 3, 1, 0, 2], 4), Answers([3, 3, 2, 1, 0, 1], 4)
    x, y = np.array(one.shares), np.array(other.shares)
    covariance = ((x - x.mean()) * (y - y.mean())).mean() - 1 / (2 * 6 * 16)
    correlation = covariance / (x.std() * y.std())
    up, down = one.accuracy.high - x.mean(), y.mean() - other.accuracy.low
    expected = (up**2 + down**2 - 2 * correlation * up * down) ** 0.5
    found = paired_difference(one, other)
    assert found.high - found.difference == pytest.approx(expected)


def skilled(seed: int, gain: float, samples: int = 1, problems: int = 1000) -> Answers:
    """Return answers to problems of equal difficulty for every seed."""
    noise = np.random.default_rng(seed)
    chance = np.clip(np.random.default_rng(0).beta(1, 1, problems) + gain, 0, 1)
    return Answers(noise.binomial(samples, chance).tolist(), samples)


@pytest.mark.parametrize("samples", [1, 8])
def test_recovered_headroom_is_fiellers_set_and_agrees_with_a_paired_bootstrap(
    samples: int,
) -> None:
    start, model, expert = (skilled(n, gain, samples) for n, gain in enumerate((0.0, 0.16, 0.2)))
    found = recovered_headroom(model, start, expert)
    assert found is not None
    m, s, e = (np.array(each.shares) for each in (model, start, expert))
    assert found.recovered == pytest.approx((m - s).mean() / (e - s).mean())
    for edge in (found.low, found.high):  # by its definition
        contrast = m - s - edge * (e - s)
        error = contrast.std(ddof=1) / len(m) ** 0.5
        assert abs(contrast.mean()) == pytest.approx(NormalDist().inv_cdf(0.975) * error)
    draws = np.random.default_rng(1).integers(0, len(m), (4000, len(m)))
    ratios = (m - s)[draws].mean(1) / (e - s)[draws].mean(1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    width = high - low
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.12 * width)


def test_headroom_of_an_expert_is_one_and_of_the_start_nothing() -> None:
    start, expert = skilled(0, 0.0), skilled(1, 0.2)
    one, zero = recovered_headroom(expert, start, expert), recovered_headroom(start, start, expert)
    assert one is not None
    assert zero is not None
    assert (one.recovered, one.low, one.high) == pytest.approx((1, 1, 1), abs=1e-6)
    assert (zero.recovered, zero.low, zero.high) == pytest.approx((0, 0, 0), abs=1e-6)


@pytest.mark.parametrize("gain", [-0.2, 0.0])
def test_an_expert_that_gained_nothing_leaves_no_headroom(gain: float) -> None:
    start, expert = skilled(0, 0.0), skilled(3, gain)
    assert paired_difference(expert, start).low <= 0
    assert recovered_headroom(skilled(2, 0.1), start, expert) is None
    assert recovered_headroom(Answers([1]), Answers([0]), Answers([1])) is None


def test_the_mean_of_headrooms_of_independent_domains() -> None:
    found = mean_headroom([Headroom(0.9, 0.6, 1.3), Headroom(0.5, 0.1, 0.8)])
    assert (found.recovered, found.low, found.high) == pytest.approx((0.7, 0.45, 0.95))
    assert mean_headroom([Headroom(0.9, 0.6, 1.3)]) == Headroom(0.9, 0.6, 1.3)


def noise(generator: np.random.Generator, n: int, correlation: float) -> np.ndarray:
    """Return n steps of a stationary noise whose neighbours correlate."""
    values = generator.normal(size=n + 50)
    for step in range(1, n + 50):
        values[step] += correlation * values[step - 1]
    return values[50:]


@pytest.mark.parametrize(
    ("n", "correlation", "most"), [(10, 0.0, 0.05), (40, 0.0, 0.05), (40, 0.5, 0.08)]
)
def test_noise_alone_seldom_rises(n: int, correlation: float, most: float) -> None:
    generator = np.random.default_rng(0)
    rises = [fitted_rise(noise(generator, n, correlation).tolist()) for _ in range(800)]
    assert 0 < np.mean([rise.low > 0 for rise in rises if rise]) <= most


@pytest.mark.parametrize("shape", ["line", "soon"])
def test_a_rise_is_found_whatever_its_shape(shape: str) -> None:
    """Also one of the first tenth of the steps, after which the series stays."""
    generator, at = np.random.default_rng(0), np.linspace(0, 1, 100)
    curve = 4 * (at if shape == "line" else 1 - np.exp(-15 * at))
    rises = [fitted_rise((curve + noise(generator, 100, 0.2)).tolist()) for _ in range(200)]
    assert np.mean([rise.low > 0 for rise in rises if rise]) > 0.85
    flipped = [fitted_rise((noise(generator, 100, 0.2) - curve).tolist()) for _ in range(200)]
    assert np.mean([rise.high < 0 for rise in flipped if rise]) > 0.85


def test_a_series_without_noise_or_steps() -> None:
    assert fitted_rise([0.1] * 9) is None
    assert fitted_rise([0.1] * 30) == Rise(0.1, 0.1, 0.0, 0.0)
    rise = fitted_rise([float(n) for n in range(20)])
    assert rise is not None and rise.low == pytest.approx(19) == rise.high
