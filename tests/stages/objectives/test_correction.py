"""Weights of tokens that pi_old did not sample, against vectors computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.objectives.surrogate import (
    IcePopSettings,
    SequenceMaskSettings,
    TisSettings,
    Tokens,
    correction_weights,
    sequence_mask,
)
from tests.stages.objectives.objective_cases import assert_close, real

RATIOS = [0.4, 1.3, 4.9, 5.1]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (TisSettings(cap=2), [0.4, 1.3, 2.0, 2.0]),
        (IcePopSettings(low=0.5, high=5), [0.0, 1.3, 4.9, 0.0]),
    ],
)
def test_vector_7(kind: Any, level: str, expected: list[float]) -> None:
    settings = kind.model_copy(update={"level": level})
    old = real(RATIOS).log().unsqueeze(1)  # four responses of one token
    mask = torch.ones(4, 1, dtype=torch.bool)
    weights = correction_weights(old, torch.zeros_like(old), mask, settings)
    assert_close(weights[:, 0], expected, tolerance=1e-12)


def test_icepop_keeps_the_bounds_of_its_range() -> None:
    old = real([[0.25, 0.5, 4.0, 8.0]]).log()
    mask = torch.ones(1, 4, dtype=torch.bool)
    settings = IcePopSettings(level="token", low=0.25, high=8)
    weights = correction_weights(old, torch.zeros_like(old), mask, settings)
    assert_close(weights, [[0.25, 0.5, 4.0, 8.0]], tolerance=1e-12)


def test_a_sequence_is_weighted_by_its_geometric_mean() -> None:
    """Six hundred ratios of .9999 give a weight of .9999; their product would be .94."""
    old = real([0.9999] * 600).log().unsqueeze(0).requires_grad_()
    mask = torch.ones(1, 600, dtype=torch.bool)
    mask[0, 500:] = False
    old.data[0, 500:] = torch.nan
    weights = correction_weights(old, torch.zeros(1, 600), mask, TisSettings(level="sequence"))
    assert_close(weights, [[0.9999] * 600])
    assert not weights.requires_grad


def test_each_token_has_its_own_weight() -> None:
    old, engine = real([[-1.0, -1.0, torch.nan]]), real([[-0.5, -3.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    weights = correction_weights(old, engine, mask, TisSettings(level="token"))
    assert_close(weights[mask], [torch.exp(real(-0.5)).item(), 2.0], tolerance=1e-12)
    assert torch.isfinite(weights).all()


def test_an_outlier_token_is_weighted_alone_by_default() -> None:
    """A factor of 1,000 on one token of 20 is a geometric mean of .708, which IcePop would keep."""
    old = real([[1000.0] + [1.0] * 19]).log()
    mask = torch.ones(1, 20, dtype=torch.bool)
    for settings, expected in ((IcePopSettings(), 0.0), (TisSettings(), 2.0)):
        weights = correction_weights(old, torch.zeros_like(old), mask, settings)
        assert_close(weights, [[expected] + [1.0] * 19], tolerance=1e-12)


def test_a_response_without_tokens_has_a_finite_weight() -> None:
    nothing = real([[torch.nan, torch.nan]])
    mask = torch.zeros(1, 2, dtype=torch.bool)
    for kind in (TisSettings, IcePopSettings):
        for level in ("token", "sequence"):
            weights = correction_weights(nothing, nothing, mask, kind(level=level))
            assert weights.tolist() == [[1.0, 1.0]]
    settings = SequenceMaskSettings(enabled=True, delta=0.1)
    assert sequence_mask(Tokens(nothing, nothing, nothing, -torch.ones(1, 2), mask), settings).all()


@pytest.mark.parametrize(
    ("advantage", "delta", "is_kept"),
    [(-1, 0.1, False), (1, 0.1, True), (-1, 0.21, True), (-1, 0.19, False), (0, 0.1, True)],
)
def test_vector_5(advantage: float, delta: float, is_kept: bool) -> None:
    """The mean of log mu - log pi_theta is .2."""
    engine, logprobs = real([[-1.0, -0.5, -2.0, 9.0]]), real([[-1.4, -0.6, -2.1, torch.nan]])
    mask = torch.tensor([[True, True, True, False]])
    settings = SequenceMaskSettings(enabled=True, delta=delta)
    advantages = torch.full_like(engine, advantage)
    keep_mask = sequence_mask(Tokens(logprobs, logprobs, engine, advantages, mask), settings)
    assert keep_mask.tolist() == [[is_kept] * 4]
