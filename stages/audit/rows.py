"""Comparisons of a run's quantities with the audit's, and the differences they may have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.audit.model import Model, Weights, norm
from stages.audit.recorded import RecordedSample

CLOSE = 1e-5  # relative: fp32 against float64
OF_TIES = 0.02  # of kept sets: rounding decides whether tokens that tie with the last one are kept


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


def exact(quantity: str, run: float, audit: float) -> Comparison:
    """Compare two counts, which must be equal."""
    return Comparison(quantity, float(run), float(audit), abs(run - audit), 0.0)


def numbers(quantity: str, run: Sequence[float], audit: Sequence[float]) -> Comparison:
    """Compare lists of numbers, by the largest difference relative to the largest of them or 1."""
    if len(run) != len(audit):
        return Comparison(quantity, len(run), len(audit), math.inf)
    scale = max([1.0, *map(abs, run), *map(abs, audit)])
    worst = max((abs(one - other) for one, other in zip(run, audit, strict=True)), default=0.0)
    return Comparison(quantity, math.hypot(*run), math.hypot(*audit), worst / scale)


def change(
    quantity: str, before: Weights, run: Weights, audit: Weights, bound: float
) -> Comparison:
    """Compare weights' movements: the 2-norm of their difference over that of the movement.

    The error of rounding each fp32 weight twice, 2^-24 of it a time, is subtracted.
    """
    moved = _distance(run, before)
    apart = max(0.0, _distance(run, audit) - 2**-23 * norm(run))
    relative = apart / moved if moved else float(apart > 0)
    return Comparison(quantity, moved, _distance(audit, before), relative, bound)


def buffers(quantity: str, run: Weights, audit: Weights) -> Comparison:
    """Compare tensors by the 2-norm of their difference over the larger of their own."""
    largest = max(norm(run), norm(audit), 1e-30)
    return Comparison(quantity, norm(run), norm(audit), _distance(run, audit) / largest)


def _distance(one: Weights, other: Weights) -> float:
    return norm({name: one[name] - other[name] for name in one})


def mismatch(
    samples: Sequence[RecordedSample], old: Sequence[torch.Tensor], logged: Mapping[str, float]
) -> list[Comparison]:
    """Compare the engine's mismatch with pi_old, relative to one nat: it is rounding itself.

    For samples of older weights it is the policy's drift.
    """
    pairs = zip(samples, old, strict=True)
    apart = torch.cat([mine - sample.logprobs[sample.learned] for sample, mine in pairs]).abs()
    if not len(apart):  # no learned tokens
        apart = torch.zeros(1, dtype=torch.float64)
    moved = "drift_max" in logged
    prefix = "drift" if moved else "mismatch"
    quantities = {
        f"{prefix}_max": float(apart.max()),
        f"{prefix}_mean": float(apart.mean()),
        f"{'drift_' * moved}high_ratio": float((apart > math.log(2)).double().mean()),
    }
    return [number(name, logged[name], value, scale=1.0) for name, value in quantities.items()]


def kept_sets(
    samples: Sequence[RecordedSample], model: Model, sampling: dict[str, Any], replay: bool
) -> list[Comparison]:
    """Compare the kept sets of freshly sampled tokens: the share that is equal, 1 in the run.

    No rows where sampling keeps the whole vocabulary.
    """
    if not samples or (sampling["top_k"] == 0 and sampling["top_p"] == 1.0):
        return []
    alike = []
    with torch.no_grad():
        for sample in samples:
            logits = model.read(sample, replay).logits / sampling["temperature"]
            # An empty set stands for the whole vocabulary, whose ids are not written.
            sets = sample.kept_ids or [torch.empty(0)] * len(logits)
            for row, kept_ids in zip(logits, sets, strict=True):
                order = row.argsort(descending=True)[: sampling["top_k"] or len(row)]
                scores = row[order].softmax(0)  # the fewest that sum to top_p or more are kept
                expected_ids = order[scores.cumsum(0) - scores < sampling["top_p"]]
                alike.append(
                    set(kept_ids.tolist() or range(len(row))) == set(expected_ids.tolist())
                )
    share = sum(alike) / len(alike)
    return [Comparison("kept sets", 1.0, share, 1.0 - share, OF_TIES)]
