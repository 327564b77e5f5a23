"""The loss of a micro-batch: every split of it, masked positions, and missing inputs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.objectives.loss import ObjectiveSettings, PolicyLoss, Totals, policy_loss
from stages.objectives.registry import RATIOS
from stages.objectives.surrogate import (
    CorrectionBase,
    IcePopSettings,
    TisSettings,
    Tokens,
    correction_weights,
)
from tests.stages.objectives.objective_cases import LENGTHS, MASK, draws, real, slope

TOTALS = Totals(sequences=4, tokens=9, longest=6)
EVERYTHING = {
    "ratio": {"name": "token"},
    "kl": {"coefficient": 0.1, "estimator": "unbiased_k3"},
    "entropy_bonus": 0.01,
    "correction": {"name": "icepop", "samples": "all"},
    "sequence_mask": {"enabled": True, "delta": 0.05},
}


def batch() -> Tokens:
    """Return all tensors that an objective may read; only `logprobs`, a leaf, has gradient."""
    logprobs, old, engine, reference, advantages, kl, entropy, weights, movement = draws(9)
    return Tokens(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old,
        engine_logprobs=engine + 0.3,
        advantages=(advantages + 0.5).sign() * real([1.0, 2.0, 0.5, 0.25])[:, None],
        mask=MASK,
        weights=-weights,
        router_movement=-movement / 3,
        reference_logprobs=reference,
        reference_kl=-kl,
        entropy=-entropy,
    )


def cut(tokens: Tokens, rows: slice) -> Tokens:
    tensors = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return Tokens(**{name: v if v is None else v[rows] for name, v in tensors.items()})


def loss_of(tokens: Tokens, totals: Totals = TOTALS, **objective: Any) -> PolicyLoss:
    settings = ObjectiveSettings.model_validate(objective)
    return policy_loss(tokens, totals, settings, settings.kl.coefficient)


def gradient(result: PolicyLoss, tokens: Tokens) -> Tensor:
    [slopes] = torch.autograd.grad(result.loss, tokens.logprobs)
    return slopes


def test_the_kl_of_stale_samples_has_the_gradient_of_the_kl() -> None:
    """The batch has every token of a vocabulary once, weighted as older weights (mu) sample it.

    pi_old is the policy itself, as in the first update of a step.
    """
    drew, reference = real([0.2, 0.5, 0.3]), real([0.5, 0.3, 0.2])
    logits = real([0.7, 0.2, 0.1]).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    tokens = Tokens(
        logprobs=logprobs.view(3, 1),
        old_logprobs=logprobs.detach().view(3, 1),
        engine_logprobs=drew.log().view(3, 1),
        advantages=torch.zeros(3, 1, dtype=torch.float64),
        mask=torch.ones(3, 1, dtype=torch.bool),
        sampling_logprobs=drew.log().view(3, 1),
        reference_logprobs=reference.log().view(3, 1),
        length_weights=drew,
    )
    objective = {"kl": {"coefficient": 1.0, "estimator": "unbiased_k3"}}
    loss_of(tokens, Totals(1, 1), **objective).loss.backward()
    assert logits.grad is not None
    numeric = slope(
        lambda x: (x.softmax(0) * (x.log_softmax(0) - reference.log())).sum(), logits.detach()
    )
    torch.testing.assert_close(logits.grad, numeric, atol=1e-7, rtol=0)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant", "lambda"])
@pytest.mark.parametrize("ratio", list(RATIOS))
def test_every_split_of_the_batch_gives_the_same_loss_and_gradient(
    ratio: str, aggregation: str
) -> None:
    objective = {**EVERYTHING, "ratio": {"name": ratio}, "aggregation": aggregation}
    tokens = batch()
    if aggregation == "lambda":
        tokens = replace(tokens, length_weights=real([0.5, 1.0, 2.0, 0.5]))

    def run(cuts: list[slice]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        shards = [loss_of(cut(tokens, rows), **objective) for rows in cuts]
        loss = sum((shard.loss for shard in shards), start=real(0.0))
        [slopes] = torch.autograd.grad(loss, tokens.logprobs)
        sums = {
            name: sum((shard.metrics[name].total for shard in shards), start=real(0.0))
            for name in shards[0].metrics
        }
        return loss.detach(), slopes, sums

    whole = run([slice(0, 4)])
    assert whole[1].any()
    for cuts in ([slice(0, 1), slice(1, 4)], [slice(i, i + 1) for i in range(4)]):
        torch.testing.assert_close(run(cuts), whole, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("ratio", list(RATIOS))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased_k3", "full"])
def test_masked_positions_change_nothing(ratio: str, estimator: str) -> None:
    kl = {"coefficient": 0.1, "estimator": estimator}
    objective = {**EVERYTHING, "ratio": {"name": ratio}, "kl": kl}
    results = []
    for filler in (0.0, -7.0, float("nan"), float("inf")):
        tensors = {f.name: getattr(batch(), f.name) for f in fields(Tokens)}
        filled = {
            name: values.detach().masked_fill(~MASK, filler)
            for name, values in tensors.items()
            if values is not None and name != "mask"
        }
        filled["logprobs"].requires_grad_()
        tokens = Tokens(**filled, mask=MASK)
        result = loss_of(tokens, **objective)
        slopes = gradient(result, tokens)
        assert not slopes[~MASK].any()
        sums = {name: metric.total.item() for name, metric in result.metrics.items()}
        results.append((result.loss.item(), slopes[MASK].tolist(), sums))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant", "lambda"])
@pytest.mark.parametrize("ratio", list(RATIOS))
def test_an_empty_mask_gives_zero_and_no_nan(ratio: str, aggregation: str) -> None:
    tokens = replace(batch(), mask=torch.zeros_like(MASK), length_weights=real([1.0] * 4))
    objective = {**EVERYTHING, "ratio": {"name": ratio}, "aggregation": aggregation}
    result = loss_of(tokens, Totals(0, 0), **objective)
    assert result.loss.item() == 0.0
    assert not gradient(result, tokens).any()
    assert all(metric.total.item() == 0.0 for metric in result.metrics.values())


@pytest.mark.parametrize("ratio", list(RATIOS))
def test_zero_variance_groups_have_no_gradient(ratio: str) -> None:
    """Their advantages are 0, however far the policy has moved."""
    nothing = torch.zeros(4, 5, dtype=torch.float64)
    still = replace(batch(), advantages=nothing, old_logprobs=nothing - 9)
    result = loss_of(still, ratio={"name": ratio})
    assert result.loss.item() == 0.0
    assert not gradient(result, still).any()


def test_gspo_token_is_gspo_where_the_tokens_of_a_response_share_an_advantage() -> None:
    advantages = real([1.0, 2.0, -0.5, 0.25])[:, None].expand(4, 5)
    tokens = replace(batch(), advantages=advantages, weights=None)
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    one, other = (
        loss_of(tokens, ratio={"name": name, **wide}) for name in ("sequence", "sequence_token")
    )
    assert one.loss.item() == pytest.approx(other.loss.item())
    slopes = gradient(one, tokens)
    assert slopes.any()
    torch.testing.assert_close(slopes, gradient(other, tokens))


@pytest.mark.parametrize("ratio", ["sequence", "token", "geometric", "rspo"])
def test_the_gradient_is_the_derivative(ratio: str) -> None:
    tokens = replace(batch(), weights=None)  # they weigh a gradient, whatever the loss's slope
    objective = {**EVERYTHING, "ratio": {"name": ratio, "clip_low": 0.1, "clip_high": 0.1}}
    # The mask of a sequence steps where the policy moves; away from the step it has no slope.
    objective["sequence_mask"] = {"enabled": True, "delta": 0.05}
    slopes = gradient(loss_of(tokens, **objective), tokens)
    numeric = slope(
        lambda logprobs: loss_of(replace(tokens, logprobs=logprobs), **objective).loss,
        tokens.logprobs.detach(),
    )
    assert slopes.any()
    torch.testing.assert_close(slopes, numeric, atol=1e-8, rtol=0)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("ratio", list(RATIOS))
def test_a_token_is_learned_by_its_own_weight(ratio: str, aggregation: str) -> None:
    """TIS and IcePop multiply each token's gradient (2510.18855; verl's GSPO).

    A masked token, of weight 0, has none; under a ratio per response too, if it is not refused.
    """
    objective = {"ratio": {"name": ratio}, "aggregation": aggregation}
    tokens = replace(batch(), weights=None)
    plain = gradient(loss_of(tokens, **objective), tokens)
    assert plain.any()
    weights = real([[0.0, 1.0, 2.0, 0.5, 1.0]]).expand(4, 5)
    weighted = replace(tokens, weights=weights)
    torch.testing.assert_close(gradient(loss_of(weighted, **objective), tokens), weights * plain)
    ones = replace(tokens, weights=torch.ones_like(weights))
    result, same = loss_of(tokens, **objective), loss_of(ones, **objective)
    assert torch.equal(gradient(same, tokens), plain)
    assert torch.equal(same.loss, result.loss)


@pytest.mark.parametrize("ratio", list(RATIOS))
@pytest.mark.parametrize("correction", [TisSettings(), IcePopSettings()], ids=lambda s: s.name)
def test_the_engines_bias_is_corrected_or_refused(ratio: str, correction: CorrectionBase) -> None:
    """All 1,296 responses of four tokens of six ids, each as often as the engine draws it.

    The reward is a sum over tokens, so that the gradient of its mean under the policy is known.
    """
    objective = ObjectiveSettings.model_validate({"ratio": {"name": ratio}})
    settings = objective.model_copy(update={"correction": correction})
    if list(settings.violations(2)):
        assert ratio in ("geometric", "rspo")
        settings = settings.model_copy(
            update={"correction": correction.model_copy(update={"level": "sequence"})}
        )
        assert not list(settings.violations(2))
        return
    generator = torch.Generator().manual_seed(0)
    logits, noise, reward = (
        torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    policy, engine = logits.log_softmax(-1), (logits + 0.2 * noise).log_softmax(-1)
    responses = torch.cartesian_prod(*[torch.arange(6)] * 4)
    at = torch.arange(4), responses
    probabilities = engine[at].sum(-1).exp()
    scores = reward[at].sum(-1)
    advantages = (scores - (probabilities * scores).sum())[:, None].expand(-1, 4)
    expected = policy.exp() * (reward - (policy.exp() * reward).sum(-1, keepdim=True)) / 4

    def bias(correct: bool) -> float:
        parameters = logits.clone().requires_grad_()
        mask = torch.ones(responses.shape, dtype=torch.bool)
        weights = correction_weights(policy[at], engine[at], mask, correction)
        tokens = Tokens(
            parameters.log_softmax(-1)[at],
            policy[at],
            engine[at],
            advantages,
            mask,
            weights=weights if correct else None,
            router_movement=torch.zeros_like(weights),
            length_weights=probabilities,
        )
        policy_loss(tokens, Totals(1, 4), settings, 0.0).loss.backward()
        assert parameters.grad is not None
        return ((parameters.grad + expected).norm() / expected.norm()).item()

    assert bias(correct=False) > 0.05
    assert bias(correct=True) < 1e-12


def test_the_entropy_and_the_full_kl_have_their_gradients() -> None:
    entropy, kl = (draw.neg().requires_grad_() for draw in draws(2))
    tokens = replace(batch(), entropy=entropy, reference_kl=kl)
    result = loss_of(
        tokens,
        kl={"coefficient": 0.1, "estimator": "full"},
        entropy_bonus=0.01,
        aggregation="token_mean",
    )
    slopes = torch.autograd.grad(result.loss, [entropy, kl])
    torch.testing.assert_close(slopes[0], torch.where(MASK, -0.01 / 9, 0.0).double())
    torch.testing.assert_close(slopes[1], torch.where(MASK, 0.1 / 9, 0.0).double())


def test_metrics_are_sums_over_their_denominator() -> None:
    tokens = batch()
    result = loss_of(tokens, **EVERYTHING)
    ratios = (tokens.logprobs - tokens.old_logprobs).exp().detach()
    bad = tokens.advantages < 0
    outside = ((ratios > 1.28) & ~bad) | ((ratios < 0.8) & bad)
    excess = tokens.engine_logprobs - tokens.logprobs.detach()
    far = torch.tensor([n > 0 and excess[i, :n].mean() > 0.05 for i, n in enumerate(LENGTHS)])

    def means(values: Tensor) -> float:
        return sum(values[i, :n].double().mean().item() for i, n in enumerate(LENGTHS) if n)

    assert tokens.weights is not None
    assert tokens.entropy is not None
    assert tokens.router_movement is not None
    expected = {
        "ratio": ("sequences", means(ratios)),
        "clip_fraction": ("sequences", means(outside)),
        "correction": ("sequences", means(tokens.weights)),
        "router_movement": ("tokens", tokens.router_movement[MASK].sum().item()),
        "masked_sequences": ("sequences", means(far[:, None] & bad)),
        "entropy": ("tokens", -tokens.logprobs[MASK].sum().item()),
        "full_entropy": ("tokens", tokens.entropy[MASK].sum().item()),
    }
    assert expected["clip_fraction"][1] > 0
    assert expected["masked_sequences"][1] > 0
    metrics = dict(result.metrics)
    assert metrics.pop("kl").denominator == "tokens"
    assert {n: (metric.denominator, metric.total.item()) for n, metric in metrics.items()} == {
        name: (denominator, pytest.approx(value)) for name, (denominator, value) in expected.items()
    }
    assert not any(metric.total.requires_grad for metric in metrics.values())


def test_the_penalty_adds_the_coefficient_times_the_kl() -> None:
    tokens = batch()
    objective = {**EVERYTHING, "aggregation": "token_mean"}
    with_kl = loss_of(tokens, **objective)
    without = loss_of(tokens, **{**objective, "kl": {}})
    assert "kl" not in without.metrics
    penalty = 0.1 * with_kl.metrics["kl"].total.item() / TOTALS.tokens
    assert (with_kl.loss - without.loss).item() == pytest.approx(penalty)


def test_the_coefficient_of_the_update_is_used() -> None:
    tokens, settings = batch(), ObjectiveSettings.model_validate({"kl": {"coefficient": 0.1}})
    none, once, twice = (policy_loss(tokens, TOTALS, settings, c).loss for c in (0.0, 0.1, 0.2))
    assert (twice - none).item() == pytest.approx(2 * (once - none).item())


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"kl": {"coefficient": 0.1}}, r"objective\.kl\.coefficient is above 0, but no log-prob"),
        ({"kl": {"coefficient": 0.1, "estimator": "full"}}, r"no KL to the reference were given"),
        ({"entropy_bonus": 0.1}, r"objective\.entropy_bonus is above 0, but no entropies"),
        ({"ratio": {"name": "rspo"}}, r"objective\.ratio is rspo, but no router movements were"),
    ],
)
def test_missing_inputs_are_reported(objective: dict[str, Any], message: str) -> None:
    plain = replace(
        batch(),
        reference_logprobs=None,
        reference_kl=None,
        entropy=None,
        router_movement=None,
    )
    with pytest.raises(ValueError, match=message):
        loss_of(plain, **objective)


@pytest.mark.parametrize(
    "corrected",
    [
        {"correction": {"name": "tis"}},
        {"sequence_mask": {"enabled": True, "delta": 1e-9}},
    ],
)
def test_corrections_change_the_policy_gradient_and_not_the_kl(corrected: dict[str, Any]) -> None:
    """Weights of 0, or masks of all sequences, leave only the penalty."""
    tokens = replace(
        batch(),
        engine_logprobs=torch.ones(4, 5, dtype=torch.float64),
        advantages=-torch.ones(4, 5, dtype=torch.float64),
        weights=torch.zeros(4, 5, dtype=torch.float64) if "correction" in corrected else None,
    )
    kl = {"coefficient": 0.1, "estimator": "k2"}
    result = loss_of(tokens, kl=kl, **corrected)
    still = replace(tokens, advantages=torch.zeros(4, 5, dtype=torch.float64), weights=None)
    penalty = loss_of(still, kl=kl)
    assert result.loss.item() == pytest.approx(penalty.loss.item())
    torch.testing.assert_close(gradient(result, tokens), gradient(penalty, still))


def test_objectives_are_imported_without_torch() -> None:
    check = (
        "import sys; import stages.objectives.loss, stages.objectives.advantages;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
