"""A KL coefficient that is steered towards a target: the proportional controller of arXiv
1909.08593, section 2.2."""

from __future__ import annotations

GAIN = 0.1  # what the coefficient grows by at most is a fifth of this, at every update
LARGEST_ERROR = 0.2


def steered(coefficient: float, kl: float, target: float) -> float:
    """The next coefficient, after an update in which the KL was `kl`; both in nats a token.

    coefficient (1 + .1 e), with e = (kl - target) / target held to +-.2.
    """
    error = max(-LARGEST_ERROR, min((kl - target) / target, LARGEST_ERROR))
    return coefficient * (1 + GAIN * error)
