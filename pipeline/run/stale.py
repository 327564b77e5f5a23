"""Refuses to build on work that no longer matches what it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import Ledger
from pipeline.run.selection import to_make_anew
from pipeline.run.states import StageState, derive
from stages.settings import RunSettings


class StaleStages(BraidError):
    """Finished or half-finished work no longer matches what it was made from."""

    def __init__(
        self, run: RunDirectory, stages: Sequence[Stage], stale: dict[str, StageState]
    ) -> None:
        lines = [f"{name}: {state.cause}" for name, state in stale.items()]
        super().__init__(
            "\n  ".join(["stages no longer match what they were made from:", *lines])
            + "\nrestore what changed, or make them anew, and all that follows them, with\n"
            f"{to_make_anew(stages, stale)}; what they left is kept in {shown(run.replaced)}"
        )


def refuse_stale(
    run: RunDirectory, settings: RunSettings, wanted: Sequence[Stage], *, record: bool = True
) -> dict[str, StageState]:
    """The state of every stage. `record` also writes into the ledger what is refused.

    Raises:
        StaleStages: finished or half-finished work of a stage that is wanted, or of an input of
            one, was made from other settings or inputs.
    """
    stages = compile_graph(settings)
    states = derive(run, settings, stages)
    stale = stale_among(states, wanted)
    for name, state in stale.items() if record else ():
        Ledger(run.ledger).append(name, "stale", state.cause, state.attempts)
    if stale:
        raise StaleStages(run, stages, stale)
    return states


def stale_among(states: Mapping[str, StageState], wanted: Sequence[Stage]) -> dict[str, StageState]:
    """Of the stages that are wanted, and the inputs of such, those that are stale."""
    touched = {name for stage in wanted for name in (stage.name, *stage.inputs)}
    return {
        name: state for name, state in states.items() if name in touched and state.state == "stale"
    }
