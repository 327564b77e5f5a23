"""Aggregations, and the learned weights by length."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from stages.objectives.groups import length_weights
from stages.objectives.loss import Totals
from stages.objectives.registry import AGGREGATIONS
from tests.stages.objectives.objective_cases import LENGTHS, MASK, assert_close, real, slope

TOTALS = Totals(sequences=4, tokens=9, longest=10)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sequence_mean", (1 + 0 + 2 + 4) / 4),
        ("token_mean", (3 * 1 + 5 * 2 + 1 * 4) / 9),
        ("lambda", (3 * 1 + 5 * 2 + 1 * 4) / 9),
        ("constant", (3 * 1 + 5 * 2 + 1 * 4) / 10 / 4),
    ],
)
def test_weights_of_tokens(name: str, expected: float) -> None:
    values = real([[1.0] * 5, [9.0] * 5, [2.0] * 5, [4.0] * 5]).masked_fill(~MASK, torch.nan)
    assert AGGREGATIONS[name].function(values, MASK, TOTALS).item() == pytest.approx(expected)


def test_an_exponent_of_0_weights_every_response_equally() -> None:
    weights = length_weights(real(LENGTHS), torch.zeros(4, dtype=torch.int64), real(0.0))
    assert_close(weights, [1.0] * 4, tolerance=1e-12)


@pytest.mark.parametrize("exponent", [-2.0, 0.7, 3.0])
def test_length_weights_are_their_formula_group_by_group(exponent: float) -> None:
    groups = [[3.0, 8.0, 1.0], [5.0, 5.0], [2.0, 40.0, 7.0, 9.0]]
    order = [0, 3, 5, 1, 4, 2, 6, 7, 8]  # members of a group need not be adjacent
    lengths = [length for group in groups for length in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    expected = []
    for group in groups:
        deviation = statistics.pstdev(group) or 1.0
        scores = [(length - statistics.mean(group)) / deviation for length in group]
        powers = [math.exp((1 + score / 9) ** exponent) for score in scores]
        expected += [len(group) * power / sum(powers) for power in powers]
    weights = length_weights(
        real([lengths[place] for place in order]),
        torch.tensor([numbers[place] for place in order]),
        real(exponent),
    )
    assert_close(weights, [expected[place] for place in order], tolerance=1e-12)
    assert (weights[order.index(1)] > weights[order.index(2)]) == (exponent > 0)  # 8 tokens, and 1


def test_the_exponent_has_the_gradient_of_its_definition() -> None:
    lengths, groups = real([3.0, 8.0, 1.0, 4.0, 4.0]), torch.tensor([0, 0, 0, 1, 1])
    losses = real([1.0, -2.0, 0.5, 3.0, 1.0])
    exponent = real(0.3).requires_grad_()
    (length_weights(lengths, groups, exponent) * losses).sum().backward()
    assert exponent.grad is not None
    numeric = slope(lambda x: (length_weights(lengths, groups, x) * losses).sum(), real(0.3))
    assert_close(exponent.grad, numeric, tolerance=1e-8)


def test_groups_of_different_sizes_do_not_affect_each_other() -> None:
    lengths = real([1.0] + [1000.0] * 70 + [5.0, 6.0])  # h is .07 for the first
    groups = torch.tensor([0] * 71 + [1, 1])
    weights = length_weights(lengths, groups, real(-4.0))
    assert_close(weights[71:].sum(), 2.0, tolerance=1e-12)
    assert_close(weights[:71].sum(), 71.0, tolerance=1e-9)


def test_outliers_of_large_groups_stay_finite() -> None:
    lengths = real([1.0] + [1000.0] * 499)
    weights = length_weights(lengths, torch.zeros(500, dtype=torch.int64), real(0.5))
    assert torch.isfinite(weights).all()
    assert length_weights(real([]), torch.zeros(0, dtype=torch.int64), real(0.5)).shape == (0,)
