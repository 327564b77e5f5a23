"""The recorded loads of experts: how often each was chosen, by step, domain and routed layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from parallel.errors import UserError
from parallel.parquet_files import UNREADABLE, read_parquet
from pipeline.text import shown
from stages.directory import StageDirectory

Slots = list[list[int]]  # by layer and expert


@dataclass(frozen=True)
class StepLoads:
    """The loads of a step: `slots` by domain, layer and expert, how often each was chosen."""

    step: int
    slots: Mapping[str, Slots]


def read_loads(directory: StageDirectory, most: int | None = None) -> list[StepLoads]:
    """Return the recorded loads of a stage by step, of at most `most` steps evenly spaced.

    Raises:
        UserError: a file is damaged.
    """
    files = sorted(directory.routing.glob("step_*.parquet"))
    if most is not None and len(files) > most:
        files = [files[(len(files) - 1) * place // (most - 1)] for place in range(most)]
    steps = []
    for path in files:
        try:
            if (loads := _of_step(read_parquet(path).to_pylist())) is not None:
                steps.append(loads)
        except UNREADABLE as error:
            why = getattr(error, "strerror", None) or f"damaged: {error}"
            raise UserError(f"{shown(path)}: {why}") from error
    if len({tuple(map(len, slots)) for loads in steps for slots in loads.slots.values()}) > 1:
        raise UserError(f"{shown(directory.routing)}: damaged: steps of different models")
    return steps


def _of_step(rows: Sequence[Mapping[str, Any]]) -> StepLoads | None:
    """Return the loads of a file's rows; None where it has none.

    Raises:
        ValueError, KeyError: a row is not as `stages.sampling.recording` writes them.
    """
    slots: dict[str, Slots] = {}
    for row in rows:
        if not isinstance(row["domain"], str) or type(row["step"]) is not int:
            raise ValueError("a row has no step or no domain")
        counts = row["slots"]
        if not isinstance(counts, list) or not all(type(count) is int for count in counts):
            raise ValueError("a row's slots are no counts")
        slots.setdefault(row["domain"], []).append(counts)
    return StepLoads(rows[0]["step"], slots) if rows else None


def shares(slots: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return each expert's share of its layer's slots."""
    return [[count / max(sum(layer), 1) for count in layer] for layer in slots]


def summed(loads: Sequence[StepLoads]) -> dict[str, Slots]:
    """Return the slots of all steps, by domain."""
    by_domain: dict[str, Slots] = {}
    for step in loads:
        for domain, slots in step.slots.items():
            total = by_domain.setdefault(domain, [[0] * len(layer) for layer in slots])
            for layer, counts in enumerate(slots):
                total[layer] = [a + b for a, b in zip(total[layer], counts, strict=True)]
    return by_domain


def churn(loads: Sequence[StepLoads]) -> list[tuple[int, float]]:
    """Return how far the loads of every step are from those of the step before, 0 to 1.

    Half the sum of the differences of the experts' shares, a mean over layers and domains.
    """
    distances_by_step = []
    for before, after in pairwise(loads):
        distances = [
            sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2
            for domain in before.slots.keys() & after.slots.keys()
            for one, other in zip(
                shares(before.slots[domain]), shares(after.slots[domain]), strict=True
            )
        ]
        if distances:
            distances_by_step.append((after.step, sum(distances) / len(distances)))
    return distances_by_step


def owned(
    slots: Mapping[str, Slots], times: float = 2.0
) -> dict[str, list[tuple[int, int, float]]]:
    """Return the experts that each domain uses most, as (layer, expert, ratio).

    The ratio is the expert's share in the domain over its mean share in the other domains, or over
    an equal share where there is no other; at least `times`, the largest first.
    """
    by_domain = {domain: shares(layers) for domain, layers in slots.items()}
    most_used: dict[str, list[tuple[int, int, float]]] = {}
    for domain, layers in by_domain.items():
        other_domains = [other for name, other in by_domain.items() if name != domain]
        ranked = []
        for layer, of_layer in enumerate(layers):
            for expert, share in enumerate(of_layer):
                usual = 1 / len(of_layer)
                if other_domains:
                    usual = sum(other[layer][expert] for other in other_domains) / len(
                        other_domains
                    )
                ratio = share / max(usual, 1e-6)
                if ratio >= times and share > 1 / len(of_layer):
                    ranked.append((layer, expert, ratio))
        most_used[domain] = sorted(ranked, key=lambda use: -use[2])
    return most_used
