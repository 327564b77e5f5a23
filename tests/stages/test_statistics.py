"""Intervals against the worked examples of Newcombe, Statistics in Medicine 17 (1998)."""

from statistics import stdev

import pytest

from stages.statistics import difference, of_problems, wilson
from tests.runs import REPOSITORY


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
def test_difference(
    after: tuple[int, int], before: tuple[int, int], low: float, high: float
) -> None:
    gain = difference(wilson(*after), wilson(*before))
    assert gain.difference == pytest.approx(after[0] / after[1] - before[0] / before[1])
    assert (gain.low, gain.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("correct", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_no_accuracy(correct: int, n: int) -> None:
    with pytest.raises(ValueError, match="no accuracy"):
        wilson(correct, n)


@pytest.mark.parametrize("after", [0, 1, 60, 100])
@pytest.mark.parametrize("before", [0, 37, 99, 100])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
def test_a_share_of_the_other_is_subtracted(after: int, before: int, share: float) -> None:
    one, other = wilson(after, 100), wilson(before, 100)
    found = difference(one, other, share)
    assert found.difference == pytest.approx(one.accuracy - share * other.accuracy)
    assert found.low <= found.difference <= found.high
    assert difference(one, other, 1.0) == difference(one, other)
    alone = difference(one, other, 0.0)
    assert (alone.low, alone.high) == pytest.approx((one.low, one.high))
    # The less of the other there is, the less its own uncertainty adds.
    assert found.high - found.low >= alone.high - alone.low - 1e-12


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
