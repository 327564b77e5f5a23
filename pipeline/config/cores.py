"""Which cores of this machine the ranks and the engines run on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.settings import EngineSettings
from pipeline.errors import BraidError


@dataclass(frozen=True)
class Cores:
    """The cores of all ranks together and those of each engine; None means any."""

    ranks: list[int] | None
    engines: list[list[int] | None]


def share_out(engine: EngineSettings, cores: Sequence[int] | None = None) -> Cores:
    """The `cores`, by default all that this process may use, as `engine.placement` wants them.

    Each rank of an engine of its `own` gets one of the last cores, and the trainer's ranks the
    rest. Engines that share the cores with the trainer keep out of one another's way: each gets
    its part of them all, where there are enough.

    Raises:
        BraidError: no core would be left for the ranks.
    """
    cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
    if engine.placement == "shared":
        part = len(cores) // engine.count
        if engine.count == 1 or part < engine.tensor:
            return Cores(None, [None] * engine.count)
        starts = range(0, engine.count * part, part)
        return Cores(None, [cores[start : start + part] for start in starts])
    if fault := placement_fault(engine, cores):
        raise BraidError(f"engine.placement: {fault}")
    first = len(cores) - engine.count * engine.tensor
    starts = range(first, len(cores), engine.tensor)
    return Cores(cores[:first], [cores[start : start + engine.tensor] for start in starts])


def placement_fault(engine: EngineSettings, cores: Sequence[int] | None = None) -> str | None:
    """Why the engines cannot be placed on the `cores`, by default all that this process may use."""
    found = len(os.sched_getaffinity(0) if cores is None else cores)
    needed = engine.count * engine.tensor + 1
    if engine.placement == "shared" or needed <= found:
        return None
    return (
        f"own needs {needed} cores, one for each of {engine.count} x {engine.tensor} engine ranks "
        f"and at least one for the trainer's, and here are {found}; use fewer, or shared"
    )
