"""The cost of each stage of a run: tokens, minutes, and the memory of its largest rank."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.files import numbered, read_text
from pipeline.run.ledger import minutes
from pipeline.run.metrics import newest_lines
from pipeline.run.run import Run
from stages.directory import StageDirectory


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage so far; None for what was not recorded.

    `minutes` are of all attempts, `peak_bytes` the most resident memory of a rank in an attempt
    that ended well, and `peak_gpu_bytes` the most that torch allocated on a rank's GPU. The engines
    are other processes, and not in either.
    """

    stage: str
    kind: str
    sampled_tokens: int | None
    trained_tokens: int | None
    minutes: float | None
    peak_bytes: int | None
    peak_gpu_bytes: int | None


def stage_costs(run: Run) -> list[StageCost]:
    """Return the cost of every stage that has started, in the order of the graph."""
    spent = minutes(run.events)
    costs = []
    for stage in run.stages:
        directory = run.stage(stage.name)
        if not directory.attempts() and stage.name not in spent:
            continue
        lines = newest_lines(directory.metrics, sys.maxsize)
        memory = _memory(directory)
        costs.append(
            StageCost(
                stage.name,
                stage.kind,
                _sum(lines, "sampled_tokens"),
                _sum(lines, "trained_tokens"),
                spent.get(stage.name),
                memory.get("peak_bytes"),
                memory.get("peak_gpu_bytes"),
            )
        )
    return costs


def _sum(lines: Sequence[Mapping[str, Any]], metric: str) -> int | None:
    """Return the sum of a metric over a stage's steps; None where a step lacks it.

    None too where the sum is not finite: a damaged line is not worth an error.
    """
    values = [line.get(metric) for line in lines]
    counted = [value for value in values if value is not None]
    total = sum(map(float, counted))
    whole = counted and len(counted) == len(values) and math.isfinite(total)
    return round(total) if whole else None


def _memory(directory: StageDirectory) -> dict[str, int]:
    """Return the peaks over the stage's attempts; none where an older version ran it."""
    largest: dict[str, int] = {}
    # Not up to the highest number: a directory's name may say 10^20.
    for attempt, _ in numbered(directory.path, "attempt_"):
        try:
            peaks = json.loads(read_text(directory.memory(attempt)))
            peaks = {name: int(value) for name, value in peaks.items()}
        except (OSError, ValueError, RecursionError, TypeError, AttributeError, OverflowError):
            continue  # it failed, or its file is damaged: not worth an error
        for name, value in peaks.items():
            largest[name] = max(value, largest.get(name, 0))
    return largest
