"""The steps of a run that a budget pays for, and the walltimes of its stages on Slurm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from parallel.errors import UserError
from pipeline.estimate.simulation import HOUR, SimulatedStage

LEAST_STEPS = 20  # of a stage: a reward that rises does so within 20 to 50
MARGIN = 1.5  # of a walltime over the simulated seconds, which are up to 43 % off
START_SECONDS = 1800.0  # of engines and ranks, before the first step


def steps_within(simulations: Sequence[SimulatedStage], hours: float) -> dict[str, int]:
    """Return the steps of every stage that together cost at most these GPU hours.

    All stages are shortened by one share, down to LEAST_STEPS.

    Raises:
        UserError: not even LEAST_STEPS of each stage fit.
    """
    steps = {simulation.stage.name: simulation.steps for simulation in simulations}
    step_costs = {
        simulation.stage.name: simulation.gpu_hours / simulation.steps for simulation in simulations
    }
    least = {name: min(count, LEAST_STEPS) for name, count in steps.items()}

    def cost(counts: dict[str, int]) -> float:
        return sum(count * step_costs[name] for name, count in counts.items())

    if cost(steps) <= hours:
        return steps
    if (needed := cost(least)) > hours:
        raise UserError(
            f"--budget {hours:g}: {LEAST_STEPS} steps of each stage already cost {needed:,.0f} GPU "
            f"hours; use --budget {math.ceil(needed)} or more, fewer domains, or a smaller model"
        )
    # A stage at LEAST_STEPS costs more than its share, which the others pay for: their share
    # shrinks, and may bring further stages to LEAST_STEPS.
    shortest: set[str] = set()
    while True:
        left = hours - cost({name: least[name] for name in shortest})
        longer = {name: count for name, count in steps.items() if name not in shortest}
        share = left / cost(longer)
        if not (below := {name for name in longer if share * steps[name] < least[name]}):
            return {
                name: least[name] if name in shortest else int(share * count)
                for name, count in steps.items()
            }
        shortest |= below


def walltimes(simulations: Iterable[SimulatedStage], longest: float) -> dict[str, str]:
    """Return the walltime of every kind of stage, as sbatch reads it.

    It is MARGIN times the longest simulated stage of the kind and START_SECONDS, in whole hours, or
    `longest` seconds where those are fewer: a stage that takes longer saves, is requeued, and
    continues.
    """
    seconds: dict[str, float] = {}
    for simulation in simulations:
        seconds[simulation.stage.kind] = max(
            seconds.get(simulation.stage.kind, 0.0), simulation.duration
        )
    return {
        kind: _walltime(min(math.ceil((MARGIN * duration + START_SECONDS) / HOUR) * HOUR, longest))
        for kind, duration in seconds.items()
    }


def _walltime(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-" * bool(days) + f"{hour:02d}:{minute:02d}:{second:02d}"
