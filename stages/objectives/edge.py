"""EDGE: what the policy was sure of counts more than what it was not (arXiv 2507.21848)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# No response counts more than ten times for its certainty: the paper's formula has no bound, and a
# response that was certain at every token would divide by 0.
LEAST_RELATIVE_ENTROPY = 0.1


def edge(advantages: Tensor, entropies: Tensor, group_means: Tensor) -> Tensor:
    """A_i / H_i, with H_i the response's mean token entropy over its group's mean of those.

    `advantages` [B, T]; `entropies` and `group_means` [B], in nats, of the policy that sampled.
    """
    relative = entropies / group_means.clamp(min=1e-12)
    return advantages / relative.clamp(min=LEAST_RELATIVE_ENTROPY).unsqueeze(-1)
