"""Ratios and their clips against vectors computed by hand and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stages.objectives.loss import Totals, sequence_mean
from stages.objectives.ratios.cispo import CispoRatioSettings
from stages.objectives.ratios.geometric import GeometricRatioSettings
from stages.objectives.ratios.rspo import RspoRatioSettings, router_shift
from stages.objectives.ratios.sequence import SequenceRatioSettings
from stages.objectives.ratios.sequence_token import SequenceTokenRatioSettings
from stages.objectives.ratios.token import TokenRatioSettings
from stages.objectives.registry import RATIOS
from stages.objectives.surrogate import RatioBase, Surrogate, Tokens
from tests.stages.objectives.objective_cases import (
    MASK,
    assert_close,
    documented,
    draws,
    real,
    slope,
)

GSPO = SequenceRatioSettings(clip_low=3e-4, clip_high=4e-4)
GSPO_TOKEN = SequenceTokenRatioSettings(clip_low=3e-4, clip_high=4e-4)
DAPO = TokenRatioSettings(clip_low=0.2, clip_high=0.28)
GMPO = GeometricRatioSettings(clip_low=0.4, clip_high=0.4)
RSPO = RspoRatioSettings(clip_low=0.4, clip_high=0.4, floor=0.8)
CISPO = CispoRatioSettings(cap=6.0)
ALL = [GSPO, GSPO_TOKEN, DAPO, GMPO, CISPO]


def surrogate_of(log_ratios: Tensor, advantages: Tensor, settings: RatioBase) -> Surrogate:
    """Return the surrogate of one response, whose old log-probabilities are 0."""
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool)
    tokens = given_tokens(log_ratios[None], torch.zeros(1, len(log_ratios)), advantages[None], mask)
    surrogate: Surrogate = RATIOS[settings.name].function(tokens, settings)
    return surrogate


def given_tokens(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tokens:
    return Tokens(logprobs, old.to(logprobs.dtype), old, advantages, mask)


def loss_of(log_ratios: Tensor, advantage: float, settings: RatioBase) -> Tensor:
    """Return the `sequence_mean` loss of one response."""
    advantages = torch.full_like(log_ratios, advantage)
    losses = surrogate_of(log_ratios, advantages, settings).loss
    return sequence_mean(losses, torch.ones_like(losses, dtype=torch.bool), Totals(1, 1))


@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN, DAPO], ids=lambda settings: settings.name)
def test_a_dual_clip_bounds_the_loss_of_a_bad_token(settings: TokenRatioSettings) -> None:
    """max(min(r A, clip(r) A), c A) for A < 0: with c = 3 the loss of r = e^2 is 3, not 7.39."""
    dual = settings.model_copy(update={"dual_clip": 3.0})
    apart, near = (torch.full((4,), value, requires_grad=True) for value in (2.0, 1.0))
    assert loss_of(apart, -1.0, settings).item() == pytest.approx(math.exp(2.0))
    assert loss_of(apart, -1.0, dual).item() == pytest.approx(3.0)
    loss_of(apart, -1.0, dual).backward()
    assert apart.grad is not None and not apart.grad.any()
    assert surrogate_of(apart, torch.full((4,), -1.0), dual).clipped.all()
    # A ratio within it and a good token are unchanged.
    assert loss_of(near, -1.0, dual).item() == pytest.approx(math.e)
    assert not surrogate_of(near, torch.full((4,), -1.0), dual).clipped.any()
    assert loss_of(apart, 1.0, dual).item() == loss_of(apart, 1.0, settings).item()


def test_every_ratio_is_tested() -> None:
    tested = {settings.name for settings in [*ALL, RSPO]}
    assert tested == documented() & RATIOS.keys()


@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN])
def test_sequence_ratio_of_vector_3(settings: RatioBase) -> None:
    surrogate = surrogate_of(real([0.1, -0.2, 0.05, 0.01]), real([1.0] * 4), settings)
    assert_close(surrogate.ratio, [[0.9900498] * 4])


@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN])
@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "has_gradient"),
    [
        (1.0005, 1.0, 1.0004, False),
        (1.0005, -1.0, -1.0005, True),
        (0.9996, 1.0, 0.9996, True),
        (0.9996, -1.0, -0.9997, False),
    ],
)
def test_sequence_clip_of_vector_3(
    settings: RatioBase, ratio: float, advantage: float, objective: float, has_gradient: bool
) -> None:
    log_ratios = real([ratio] * 3).log().requires_grad_()
    loss = loss_of(log_ratios, advantage, settings)
    loss.backward()
    assert_close(loss, -objective, tolerance=1e-12)
    # d(-s A)/d(log-ratio of one of T tokens) = -s A / T
    expected = -ratio * advantage / 3 if has_gradient else 0.0
    assert log_ratios.grad is not None
    assert_close(log_ratios.grad, [expected] * 3, tolerance=1e-12)


def test_gspo_token_lets_tokens_learn_from_their_own_advantages() -> None:
    log_ratios = real([1e-4, -1e-4, 2e-4]).requires_grad_()
    advantages = real([1.0, -2.0, 0.0])
    surrogate = surrogate_of(log_ratios, advantages, GSPO_TOKEN)
    surrogate.loss.sum().backward()
    ratio = math.exp(2e-4 / 3)
    assert log_ratios.grad is not None
    assert_close(log_ratios.grad, (-ratio * advantages).tolist(), tolerance=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_token_clip_binds_token_by_token(advantage: float) -> None:
    ratios = real([0.5, 0.9, 1.2, 1.5])
    log_ratios = ratios.log().requires_grad_()
    loss = loss_of(log_ratios, advantage, DAPO)
    loss.backward()
    clipped = real([0.5, 0.9, 1.2, 1.28] if advantage > 0 else [0.8, 0.9, 1.2, 1.5])
    assert_close(loss, (-advantage * clipped.mean()).item(), tolerance=1e-12)
    free = clipped == ratios
    expected = torch.where(free, -advantage * ratios / 4, 0.0)
    assert log_ratios.grad is not None
    assert_close(log_ratios.grad, expected, tolerance=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gmpo_clips_tokens_before_their_mean(advantage: float) -> None:
    log_ratios = real([-0.9, -0.1, 0.2, 0.9]).requires_grad_()
    loss = loss_of(log_ratios, advantage, GMPO)
    loss.backward()
    held = [-0.9, -0.1, 0.2, 0.4] if advantage > 0 else [-0.4, -0.1, 0.2, 0.9]
    ratio = math.exp(sum(held) / 4)
    assert_close(loss, -advantage * ratio, tolerance=1e-12)
    free = [h == g for h, g in zip(held, log_ratios.tolist(), strict=True)]
    assert log_ratios.grad is not None
    assert_close(
        log_ratios.grad, [-advantage * ratio / 4 if f else 0.0 for f in free], tolerance=1e-12
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(advantage: float) -> None:
    log_ratios = real([0.1, 0.9, 6.0, 7.0]).log().requires_grad_()
    surrogate = surrogate_of(log_ratios, real([advantage] * 4), CISPO)
    surrogate.loss.sum().backward()
    weights = real([0.1, 0.9, 6.0, 6.0])
    assert surrogate.clipped.tolist() == [[False, False, False, True]]
    assert_close(surrogate.loss[0], -weights * advantage * log_ratios.detach(), tolerance=1e-12)
    assert log_ratios.grad is not None
    assert_close(log_ratios.grad, -weights * advantage, tolerance=1e-12)


def test_cispo_with_a_floor_equals_verl() -> None:
    """verl's `cispo` has the weight clamp(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high)."""
    log_ratios = real([0.1, 0.85, 1.0, 7.0]).log()
    surrogate = surrogate_of(log_ratios, real([1.0] * 4), CispoRatioSettings(cap=1.28, floor=0.8))
    assert_close(surrogate.loss[0], -real([0.8, 0.85, 1.0, 1.28]) * log_ratios, tolerance=1e-12)
    assert surrogate.clipped.tolist() == [[True, False, False, True]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("settings", "lowest", "highest"),
    [
        (GSPO, math.log(1 - 3e-4), math.log(1 + 4e-4)),
        (GSPO_TOKEN, math.log(1 - 3e-4), math.log(1 + 4e-4)),
        (DAPO, math.log(0.8), math.log(1.28)),
        (GMPO, -0.4, 0.4),
    ],
    ids=lambda settings: getattr(settings, "name", None),
)
def test_there_is_no_gradient_beyond_the_clip(
    settings: RatioBase, lowest: float, highest: float, advantage: float
) -> None:
    """One token is clipped on the side that its advantage pushes to, and on no other."""
    end, opposite = (highest, lowest - 1) if advantage > 0 else (lowest, highest + 1)
    within, beyond = end - 1e-9 * advantage, end + 1e-9 * advantage
    for log_ratio, learns in [(within, True), (beyond, False), (opposite, True)]:
        log_ratios = real([log_ratio]).requires_grad_()
        surrogate = surrogate_of(log_ratios, real([advantage]), settings)
        surrogate.loss.sum().backward()
        assert log_ratios.grad is not None
        ratio = math.exp(log_ratio)
        assert_close(log_ratios.grad, [-ratio * advantage if learns else 0.0], tolerance=1e-12)
        assert_close(surrogate.loss, [[-ratio * advantage]], tolerance=1e-8)
        assert surrogate.clipped.item() is not learns


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings.name)
def test_on_policy_gradient_is_that_of_reinforce(settings: RatioBase) -> None:
    log_ratios = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    loss_of(log_ratios, 0.7, settings).backward()
    assert log_ratios.grad is not None
    assert_close(log_ratios.grad, [-0.7 / 5] * 5, tolerance=1e-12)


@pytest.mark.parametrize("settings", [GSPO, GSPO_TOKEN, DAPO, GMPO], ids=lambda s: s.name)
def test_log_ratios_are_clamped_to_20(settings: RatioBase) -> None:
    loss = loss_of(real([1000.0, 1000.0]), -1.0, settings)
    assert loss.item() == pytest.approx(math.exp(20))


@pytest.mark.parametrize("settings", [GSPO, DAPO, GMPO], ids=lambda s: s.name)
def test_gradients_are_the_derivatives(settings: RatioBase) -> None:
    """By central differences, for ratios whose surrogate stops no gradient."""
    logprobs, old, advantages = draws(3)
    advantages = advantages + 0.5
    close = settings.model_copy(update={"clip_low": 0.1, "clip_high": 0.1})

    def loss(values: Tensor) -> Tensor:
        losses = (
            RATIOS[settings.name].function(given_tokens(values, old, advantages, MASK), close).loss
        )
        return losses.masked_fill(~MASK, 0.0).sum()

    leaf = logprobs.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    assert leaf.grad.any()
    assert_close(leaf.grad, slope(loss, logprobs), tolerance=1e-7)


def test_vector_8() -> None:
    old = real([[0.5, 0.3], [0.6, 0.2]]).log()
    new = real([[0.4, 0.3], [0.6, 0.1]]).log()
    shifts = (new - old).abs().mean(-1)
    assert_close(shifts, [0.1115718, 0.3465736], tolerance=1e-7)
    assert math.exp(-shifts.mean().item()) == pytest.approx(0.7952707, abs=1e-7)
    assert router_shift(shifts.mean(), floor=0.7).item() == pytest.approx(0.7952707, abs=1e-7)
    assert router_shift(shifts.mean(), floor=0.8).item() == 0.8
    near = router_shift(real(0.05).requires_grad_(), floor=0.8)
    assert near.item() == pytest.approx(math.exp(-0.05))
    assert not near.requires_grad


def test_rspo_scales_ratios_before_they_are_clipped() -> None:
    log_ratios = real([[0.1, 0.5, -0.2]]).requires_grad_()
    gammas = real([[0.8, 0.95, 1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    old = torch.zeros(1, 3, dtype=torch.float64)
    tokens = given_tokens(log_ratios, old, torch.ones_like(old), mask)
    surrogate = RATIOS["rspo"].function(replace(tokens, router_movement=-gammas.log()), RSPO)
    held = [0.1 + math.log(0.8), 0.4, -0.2]
    assert_close(surrogate.ratio, [[math.exp(sum(held) / 3)] * 3], tolerance=1e-12)
    assert surrogate.clipped.tolist() == [[False, True, False]]
    slopes = torch.autograd.grad(surrogate.loss.sum(), log_ratios)[0]
    assert (slopes == 0).tolist() == [[False, True, False]]
    plain = RATIOS["geometric"].function(tokens, GMPO)
    same = RATIOS["rspo"].function(replace(tokens, router_movement=torch.zeros_like(old)), RSPO)
    assert torch.equal(plain.loss, same.loss)
