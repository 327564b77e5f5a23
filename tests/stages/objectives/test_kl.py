"""Estimators of KL against a vector computed by hand, and the coefficient's controller."""

from __future__ import annotations

import pytest
import torch

from stages.objectives.kl import kl_controller
from stages.objectives.registry import KL_ESTIMATORS
from tests.stages.objectives.objective_cases import assert_close, real, slope


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
def test_vector_2(estimator: str, reference: float, old: float, expected: float) -> None:
    value = KL_ESTIMATORS[estimator].function(real(-1.0), real(reference), real(old))
    assert_close(value, expected, tolerance=1e-7)


def test_gradients() -> None:
    # With d = ref - pi: k1' = 1, k2' = -d, k3' = 1 - e^d, (r k3)' = r (k3 + k3').
    d, log_ratio = 0.5, 0.3
    k3, change = real(d).exp() - d - 1, 1 - real(d).exp()
    expected = {"k1": 1.0, "k2": -d, "k3": change, "unbiased_k3": real(0.3).exp() * (k3 + change)}
    for name, gradient in expected.items():
        logprobs = real(-1.0).requires_grad_()
        KL_ESTIMATORS[name].function(logprobs, real(-1.0 + d), real(-1.0 - log_ratio)).backward()
        assert logprobs.grad is not None
        assert_close(logprobs.grad, float(gradient), tolerance=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_have_the_kl_as_their_mean(name: str) -> None:
    """Under the policy itself the expectation is the KL, 0.0851228 in vector 6."""
    p, q = real([0.7, 0.2, 0.1]), real([0.5, 0.3, 0.2])
    mean = (p * KL_ESTIMATORS[name].function(p.log(), q.log(), p.log())).sum()
    assert_close(mean, 0.0851228, tolerance=1e-7)


def test_unbiased_k3_has_the_gradient_of_the_kl_off_policy() -> None:
    """d(reverse KL)/d logits of vector 6, from samples of another policy."""
    old, q = real([0.2, 0.5, 0.3]), real([0.5, 0.3, 0.2])
    logits = real([0.7, 0.2, 0.1]).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    (old * KL_ESTIMATORS["unbiased_k3"].function(logprobs, q.log(), old.log())).sum().backward()
    assert logits.grad is not None
    assert_close(logits.grad, [0.1759446, -0.0981176, -0.0778270], tolerance=1e-7)
    numeric = slope(lambda x: (x.softmax(0) * (x.log_softmax(0) - q.log())).sum(), logits.detach())
    assert_close(logits.grad, numeric, tolerance=1e-7)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(1.0, 0.2), (1.1, 0.202), (1.2, 0.204), (50.0, 0.204), (0.9, 0.198), (0.0, 0.196)],
)
def test_an_update_changes_the_coefficient_by_at_most_a_fiftieth(
    kl: float, expected: float
) -> None:
    assert kl_controller(0.2, kl, target=1.0) == pytest.approx(expected)


def test_the_coefficient_converges_at_the_target() -> None:
    """A KL of 1 / coefficient and a target of 4 lead to 0.25."""
    coefficient = 1.0
    for _ in range(400):
        coefficient = kl_controller(coefficient, 1 / coefficient, target=4.0)
    assert coefficient == pytest.approx(0.25, rel=1e-3)


def test_distant_policies_do_not_overflow() -> None:
    values = KL_ESTIMATORS["k3"].function(real([-1000.0]), real([0.0]), real([0.0]))
    assert torch.isfinite(values).all()
