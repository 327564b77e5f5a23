"""Objectives against the hand-computed vectors of the algorithms (section 8) and closed forms."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from stages.objectives.advantages import group_advantages, zero_variance
from stages.objectives.aggregation import Totals, sequence_mean, token_mean
from stages.objectives.importance import truncated_importance
from stages.objectives.kl import KL_ESTIMATORS
from stages.objectives.policy_loss import policy_loss
from stages.objectives.ratios import RATIOS
from stages.objectives.settings import (
    AdvantageSettings,
    KLSettings,
    ObjectiveSettings,
    RatioSettings,
    SequenceRatioSettings,
    TokenRatioSettings,
)

GSPO = SequenceRatioSettings(clip_low=3e-4, clip_high=4e-4)
DAPO = TokenRatioSettings(clip_low=0.2, clip_high=0.28)


def real(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, real(expected), atol=tolerance, rtol=0)


# Section 1: advantages


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            AdvantageSettings(name="grpo", std="population"),
            [0.904534, -1.507557, 0.904534, -0.301511],
        ),
        (AdvantageSettings(name="grpo", std="sample"), [0.783349, -1.305582, 0.783349, -0.261116]),
        (AdvantageSettings(name="dr_grpo"), [0.375, -0.625, 0.375, -0.125]),
    ],
)
def test_advantages_of_vector_1(settings: AdvantageSettings, expected: list[float]) -> None:
    rewards = real([1, 0, 1, 0.5])
    # 1e-6 beside the standard deviation moves the fifth digit of the vector's values.
    assert_close(group_advantages(rewards, settings), expected, tolerance=5e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("std", ["population", "sample"])
def test_zero_variance_gives_exactly_zero(name: str, std: str) -> None:
    settings = AdvantageSettings(name=name, std=std)
    rewards = torch.tensor([[0.1] * 7, [0.0] * 7, [1.0] * 6 + [0.0]])
    advantages = group_advantages(rewards, settings)
    assert zero_variance(rewards).tolist() == [True, True, False]
    assert not advantages[:2].any()
    assert advantages[2].all()
    assert group_advantages(torch.tensor([0.3]), settings).tolist() == [0.0]


# Section 2: ratios


def surrogate_loss(log_ratios: Tensor, advantage: float, settings: RatioSettings) -> Tensor:
    """The `sequence_mean` loss of one response."""
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool)
    surrogate = RATIOS[settings.name](log_ratios[None], real([advantage]), mask, settings)
    return sequence_mean(surrogate.loss, mask, Totals(sequences=1, tokens=len(log_ratios)))


def test_sequence_ratio_of_vector_3() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    log_ratio = real([[0.1, -0.2, 0.05, 0.01]])
    surrogate = RATIOS["sequence"](log_ratio, real([1.0]), mask, GSPO)
    assert_close(surrogate.ratio, [[0.9900498] * 4])


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
    ratio: float, advantage: float, objective: float, has_gradient: bool
) -> None:
    log_ratios = real([ratio] * 3).log().requires_grad_()
    loss = surrogate_loss(log_ratios, advantage, GSPO)
    loss.backward()
    assert_close(loss.detach(), -objective, tolerance=1e-12)
    # d(-s A)/d(log-ratio of one of T tokens) = -s A / T
    expected = -ratio * advantage / 3 if has_gradient else 0.0
    assert_close(log_ratios.grad, [expected] * 3, tolerance=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_token_clip_binds_token_by_token(advantage: float) -> None:
    ratios = real([0.5, 0.9, 1.2, 1.5])
    log_ratios = ratios.log().requires_grad_()
    loss = surrogate_loss(log_ratios, advantage, DAPO)
    loss.backward()
    clipped = real([0.5, 0.9, 1.2, 1.28] if advantage > 0 else [0.8, 0.9, 1.2, 1.5])
    assert_close(loss.detach(), (-advantage * clipped.mean()).item(), tolerance=1e-12)
    free = clipped == ratios
    expected = torch.where(free, -advantage * ratios / 4, 0.0)
    torch.testing.assert_close(log_ratios.grad, expected)


@pytest.mark.parametrize("settings", [GSPO, DAPO])
def test_on_policy_gradient_is_that_of_reinforce(settings: RatioSettings) -> None:
    log_ratios = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    surrogate_loss(log_ratios, 0.7, settings).backward()
    assert_close(log_ratios.grad, [-0.7 / 5] * 5, tolerance=1e-12)


@pytest.mark.parametrize("settings", [GSPO, DAPO])
def test_log_ratios_are_held_to_20(settings: RatioSettings) -> None:
    loss = surrogate_loss(real([1000.0, 1000.0]), -1.0, settings)
    assert loss.item() == pytest.approx(torch.tensor(20.0, dtype=torch.float64).exp().item())


# Section 3: KL


@pytest.mark.parametrize(
    ("estimator", "reference", "old", "expected"),
    [
        ("k1", -1.2, -1.0, 0.2),
        ("k2", -1.2, -1.0, 0.02),
        ("k3", -1.2, -1.0, 0.0187308),
        ("k1", -0.5, -1.0, -0.5),
        ("k2", -0.5, -1.0, 0.125),
        ("k3", -0.5, -1.0, 0.1487213),
        ("unbiased_k3", -0.5, -1.3, 0.2007527),
    ],
)
def test_kl_of_vector_2(estimator: str, reference: float, old: float, expected: float) -> None:
    value = KL_ESTIMATORS[estimator](real(-1.0), real(reference), real(old))
    assert_close(value, expected, tolerance=1e-7)


def test_kl_gradients() -> None:
    # With d = ref - pi: k1' = 1, k2' = -d, k3' = 1 - e^d, (r k3)' = r (k3 + k3').
    d, log_ratio = 0.5, 0.3
    k3, slope = real(d).exp() - d - 1, 1 - real(d).exp()
    expected = {"k1": 1.0, "k2": -d, "k3": slope, "unbiased_k3": real(0.3).exp() * (k3 + slope)}
    for name, gradient in expected.items():
        log_probs = real(-1.0).requires_grad_()
        KL_ESTIMATORS[name](log_probs, real(-1.0 + d), real(-1.0 - log_ratio)).backward()
        assert_close(log_probs.grad, float(gradient), tolerance=1e-12)


# Aggregation and the whole loss

LENGTHS = [3, 0, 5, 1]
ADVANTAGES = real([1.0, 2.0, -0.5, 0.25])
TOTALS = Totals(sequences=4, tokens=9)
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [4, 5] of the policy (a leaf), of the old policy, of the reference."""
    generator = torch.Generator().manual_seed(0)
    draws = -torch.rand(3, 4, 5, generator=generator, dtype=torch.float64)
    return draws[0].requires_grad_(), draws[1], draws[2]


def objective(ratio: RatioSettings, aggregation: str, coefficient: float) -> ObjectiveSettings:
    kl = KLSettings(coefficient=coefficient, estimator="k3")
    return ObjectiveSettings(ratio=ratio, aggregation=aggregation, kl=kl)


def test_aggregation_weights() -> None:
    values = real([[1.0] * 5, [9.0] * 5, [2.0] * 5, [4.0] * 5])
    assert sequence_mean(values, MASK, TOTALS).item() == (1 + 0 + 2 + 4) / 4
    assert token_mean(values, MASK, TOTALS).item() == (3 * 1 + 5 * 2 + 1 * 4) / 9


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("ratio", [GSPO, DAPO])
def test_any_cut_of_the_batch_gives_the_same_loss_and_gradient(
    ratio: RatioSettings, aggregation: str
) -> None:
    settings = objective(ratio, aggregation, coefficient=0.1)

    def run(cuts: list[slice]) -> tuple[Tensor, Tensor, Tensor]:
        log_probs, old, reference = batch()
        loss, kl = real(0.0), real(0.0)
        for cut in cuts:
            shard = policy_loss(
                log_probs[cut],
                old[cut],
                ADVANTAGES[cut],
                MASK[cut],
                TOTALS,
                settings,
                reference[cut],
            )
            shard.loss.backward()
            loss += shard.loss.detach()
            kl += shard.metrics["kl"].total
        assert log_probs.grad is not None
        return loss, log_probs.grad, kl

    whole = run([slice(0, 4)])
    for cuts in ([slice(0, 1), slice(1, 4)], [slice(i, i + 1) for i in range(4)]):
        torch.testing.assert_close(run(cuts), whole, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("ratio", [GSPO, DAPO])
def test_masked_positions_touch_nothing(ratio: RatioSettings) -> None:
    settings = objective(ratio, "sequence_mean", coefficient=0.1)
    results = []
    for filler in (0.0, -7.0, float("nan")):
        log_probs, old, reference = (t.detach().masked_fill(~MASK, filler) for t in batch())
        log_probs.requires_grad_()
        result = policy_loss(log_probs, old, ADVANTAGES, MASK, TOTALS, settings, reference)
        result.loss.backward()
        assert log_probs.grad is not None
        assert not log_probs.grad[~MASK].any()
        sums = {name: metric.total.item() for name, metric in result.metrics.items()}
        results.append((result.loss.item(), log_probs.grad[MASK].tolist(), sums))
    assert results[0] == results[1] == results[2]


def test_an_empty_mask_gives_zero_and_no_nan() -> None:
    log_probs, old, reference = batch()
    nothing = torch.zeros_like(MASK)
    settings = objective(DAPO, "token_mean", coefficient=0.1)
    totals = Totals(sequences=0, tokens=0)
    result = policy_loss(log_probs, old, ADVANTAGES, nothing, totals, settings, reference)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert log_probs.grad is not None
    assert not log_probs.grad.any()
    assert all(metric.total.item() == 0.0 for metric in result.metrics.values())


def test_metrics_are_sums_over_their_denominator() -> None:
    log_probs, old, reference = batch()
    settings = objective(DAPO, "sequence_mean", coefficient=0.1)
    result = policy_loss(log_probs, old, ADVANTAGES, MASK, TOTALS, settings, reference)
    ratios = (log_probs - old).exp().detach()
    expected_ratio = sum(ratios[i, :n].mean().item() for i, n in enumerate(LENGTHS) if n)
    outside = ((ratios > 1.28) & (ADVANTAGES > 0)[:, None]) | (
        (ratios < 0.8) & (ADVANTAGES < 0)[:, None]
    )
    expected_clips = sum(outside[i, :n].double().mean().item() for i, n in enumerate(LENGTHS) if n)
    assert expected_clips > 0
    assert {name: metric.denominator for name, metric in result.metrics.items()} == {
        "ratio": "sequences",
        "clip_fraction": "sequences",
        "entropy": "tokens",
        "kl": "tokens",
    }
    assert result.metrics["ratio"].total.item() == pytest.approx(expected_ratio)
    assert result.metrics["clip_fraction"].total.item() == pytest.approx(expected_clips)
    assert result.metrics["entropy"].total.item() == pytest.approx(-log_probs[MASK].sum().item())
    assert not any(metric.total.requires_grad for metric in result.metrics.values())


def test_the_penalty_adds_the_coefficient_times_the_kl() -> None:
    log_probs, old, reference = batch()
    with_kl, without = (
        policy_loss(
            log_probs, old, ADVANTAGES, MASK, TOTALS, objective(GSPO, "token_mean", c), reference
        )
        for c in (0.1, 0.0)
    )
    assert "kl" not in without.metrics
    penalty = 0.1 * with_kl.metrics["kl"].total.item() / TOTALS.tokens
    assert (with_kl.loss - without.loss).item() == pytest.approx(penalty)


def test_a_penalty_without_a_reference_is_refused() -> None:
    log_probs, old, _ = batch()
    settings = objective(GSPO, "sequence_mean", coefficient=0.1)
    with pytest.raises(ValueError, match=r"kl\.coefficient is 0\.1 but no reference"):
        policy_loss(log_probs, old, ADVANTAGES, MASK, TOTALS, settings)


def test_objectives_are_read_without_torch() -> None:
    check = (
        "import sys; import stages.objectives.policy_loss, stages.objectives.advantages;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


# Section 4: samples of older weights


def test_importance_is_truncated_as_in_vector_7() -> None:
    old = real([0.4, 1.3, 4.9, 5.1]).log().unsqueeze(1)
    mask = torch.ones(4, 1, dtype=torch.bool)
    assert_close(truncated_importance(old, torch.zeros_like(old), mask), [0.4, 1.3, 2.0, 2.0])


def test_importance_is_a_geometric_mean_over_the_response() -> None:
    """Six hundred tokens of .9999 weigh .9999; a product would make .94 of them."""
    old = real([0.9999] * 600).log().unsqueeze(0).requires_grad_()
    mask = torch.ones(1, 600, dtype=torch.bool)
    mask[0, 500:] = False
    old.data[0, 500:] = torch.nan
    weights = truncated_importance(old, torch.zeros(1, 600), mask)
    assert_close(weights, [0.9999])
    assert not weights.requires_grad


def test_importance_weighs_the_surrogate_and_not_the_kl() -> None:
    settings = ObjectiveSettings(kl=KLSettings(coefficient=0.1, estimator="k3"))
    log_probs, reference = real([[-1.0, -2.0], [-0.5, -0.1]]), real([[-1.5, -1.0], [-0.7, -0.3]])
    mask = torch.ones(2, 2, dtype=torch.bool)

    def loss(advantages: list[float], importance: Tensor | None = None) -> Tensor:
        arguments = (
            log_probs,
            log_probs,
            real(advantages),
            mask,
            Totals(2, 4),
            settings,
            reference,
        )
        return policy_loss(*arguments, importance).loss

    assert_close(loss([1.0, -1.0], real([0.5, 2.0])), loss([0.5, -2.0]).item())
    assert_close(loss([1.0, -1.0], real([0.0, 0.0])), loss([0.0, 0.0]).item())
