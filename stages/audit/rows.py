"""Comparisons of a run's quantities with the audit's, and the differences they may have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.audit.model import Weights

CLOSE = 1e-5  # relative: fp32 against float64


@dataclass(frozen=True)
class Comparison:
    """One quantity: the run's value, the audit's, their relative difference and its `bound`.

    Of many numbers at once the values are their 2-norms.
    """

    quantity: str
    run: float
    audit: float
    difference: float
    bound: float = CLOSE

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound  # not where it is NaN


def number(quantity: str, run: float, audit: float, scale: float = 1e-2) -> Comparison:
    """Compare two numbers, relative to the larger or to `scale`.

    A sum of terms of both signs needs a scale: below it, rounding decides the number.
    """
    largest = max(abs(run), abs(audit), scale)
    return Comparison(quantity, run, audit, abs(run - audit) / largest)


def numbers(quantity: str, run: Sequence[float], audit: Sequence[float]) -> Comparison:
    """Compare lists of numbers, by the largest difference relative to the largest of them or 1."""
    if len(run) != len(audit):
        return Comparison(quantity, len(run), len(audit), math.inf)
    pairs = list(zip(run, audit, strict=True))
    scale = max([1.0, *(abs(value) for pair in pairs for value in pair)])
    worst = max((abs(one - other) for one, other in pairs), default=0.0)
    mine, theirs = (math.sqrt(sum(value**2 for value in each)) for each in (run, audit))
    return Comparison(quantity, mine, theirs, worst / scale)


def change(
    quantity: str, before: Weights, run: Weights, audit: Weights, bound: float
) -> Comparison:
    """Compare weights' movements: the 2-norm of their difference over that of the movement.

    The rounding of fp32 weights is subtracted.
    """

    def distance(one: Weights, other: Weights) -> float:
        return math.sqrt(sum(float((one[n] - other[n]).square().sum()) for n in before))

    moved = distance(run, before)
    apart = max(0.0, distance(run, audit) - _rounding(run))
    relative = apart / moved if moved else float(apart > 0)
    return Comparison(quantity, moved, distance(audit, before), relative, bound)


def _rounding(weights: Weights) -> float:
    """Return the 2-norm of the error of rounding each weight to fp32 twice, 2^-24 of it a time."""
    return 2**-23 * math.sqrt(sum(float(each.square().sum()) for each in weights.values()))


def buffers(quantity: str, run: Weights, audit: Weights) -> Comparison:
    """Compare tensors by the 2-norm of their difference over their own."""
    mine, theirs = (
        torch.cat([each[name].flatten() for name in run]).norm().item() for each in (run, audit)
    )
    apart = math.sqrt(sum(float((run[n] - audit[n]).square().sum()) for n in run))
    return Comparison(quantity, mine, theirs, apart / max(mine, theirs, 1e-30))
