"""Lambda-GRPO: how much the length of a response counts is learned (arXiv 2510.06870)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SPREAD = 9.0  # what divides the standard score of a length


def length_weights(lengths: Tensor, groups: Tensor, exponent: Tensor) -> Tensor:
    """f_i = G softmax(h^lambda), with h_i = 1 + z_i / 9, of n responses: [n].

    z_i is the standard score of a response's length within its group, in population standard
    deviations, and 0 where all are equally long; both softmax and mean are over the G responses of
    the group. `lengths` [n] floating point, in tokens; `groups` int64 [n], which group each belongs
    to, from 0; `exponent`, lambda, a scalar with gradient. At 0 every weight is 1, above it long
    responses count for more, below it short ones.
    """
    count = _sums(lengths.new_ones(lengths.shape), groups)[groups]
    centred = lengths - _sums(lengths, groups)[groups] / count
    deviation = (_sums(centred.square(), groups)[groups] / count).sqrt()
    score = centred / deviation.where(deviation > 0, 1.0)
    # h stays above 0 in groups of any size.
    logits = (1 + score / SPREAD).clamp(min=1e-3) ** exponent
    powers = (logits - _highest(logits.detach(), groups)[groups]).exp()
    return count * powers / _sums(powers, groups)[groups]


def _sums(values: Tensor, groups: Tensor) -> Tensor:
    """The sum of every group, [groups]."""
    return values.new_zeros(_size(groups)).index_add(0, groups, values)


def _highest(values: Tensor, groups: Tensor) -> Tensor:
    """The largest of every group, [groups]."""
    start = values.new_full((_size(groups),), -float("inf"))
    return start.scatter_reduce(0, groups, values, "amax")


def _size(groups: Tensor) -> int:
    return int(groups.max()) + 1 if len(groups) else 0
