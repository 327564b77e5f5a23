"""Estimators of KL(pi_theta || pi_ref) from the sampled tokens (algorithms, section 3).

Every estimator takes log-probabilities [...] in nats, of the policy, the reference and the policy
that sampled, and returns one value a token. d = log pi_ref - log pi_theta throughout.
Source of k1, k2, k3: Schulman, "Approximating KL divergence", 2020.

The estimator `full` is none: it is the KL over the whole vocabulary, which is computed where the
logits are (`parallel.model.vocabulary`) and has gradient through all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stages.objectives.surrogate import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

FULL = "full"


def k1(log_probs: Tensor, reference: Tensor, drawn: Tensor) -> Tensor:
    """-d: unbiased as a measurement; as a loss its gradient averages to nothing."""
    return log_probs - reference


def k2(log_probs: Tensor, reference: Tensor, drawn: Tensor) -> Tensor:
    """d^2 / 2: biased, never negative, and on-policy its gradient is that of the true KL."""
    return (reference - log_probs).square() / 2


def k3(log_probs: Tensor, reference: Tensor, drawn: Tensor) -> Tensor:
    """e^d - d - 1: unbiased, never negative; the KL of GRPO (arXiv 2402.03300)."""
    difference = reference - log_probs
    return bounded_exp(difference) - difference - 1


def unbiased_k3(log_probs: Tensor, reference: Tensor, drawn: Tensor) -> Tensor:
    """(pi_theta / what drew the token) k3 with gradient through both: unbiased off-policy, whatever
    the age of what drew it (2512.02556)."""
    return bounded_exp(log_probs - drawn) * k3(log_probs, reference, drawn)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "unbiased_k3": unbiased_k3,
}


# The proportional controller of arXiv 1909.08593, section 2.2.
CONTROLLER_GAIN = 0.1
LARGEST_ERROR = 0.2  # so an update changes the coefficient by at most 2 %


def kl_controller(coefficient: float, kl: float, target: float) -> float:
    """Return coefficient (1 + 0.1 e), with e = (kl - target) / target clipped to +-0.2.

    `kl`, that of the last update, and `target` are in nats a token.
    """
    error = max(-LARGEST_ERROR, min((kl - target) / target, LARGEST_ERROR))
    return coefficient * (1 + CONTROLLER_GAIN * error)
