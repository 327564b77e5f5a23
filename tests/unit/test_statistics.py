"""Intervals against the worked examples of Newcombe, Statistics in Medicine 17 (1998)."""

import pytest

from stages.statistics import difference, wilson


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
    with pytest.raises(ValueError, match="is no accuracy"):
        wilson(correct, n)
