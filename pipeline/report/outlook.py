"""What would happen to every stage, were the run to go on from where its stages stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from pipeline.run.graph import Stage
from pipeline.run.states import STOPPED_MARK, StageState


def next_action(stages: Sequence[Stage], states: Mapping[str, StageState]) -> dict[str, str]:
    """What would happen to each stage, in words."""
    gates = held(stages, states)
    return {
        stage.name: _next_action(stage, states[stage.name], gates.get(stage.name, ()))
        for stage in stages
    }


def held(stages: Sequence[Stage], states: Mapping[str, StageState]) -> dict[str, tuple[str, ...]]:
    """The stages that cannot start, each with the gates that have stopped and keep it from that,
    through however many stages between them; a gate that has stopped keeps itself."""
    found: dict[str, tuple[str, ...]] = {}
    for stage in stages:  # what it waits for comes first
        state = states[stage.name]
        if has_stopped(state):
            found[stage.name] = (stage.name,)
        elif state.state in ("pending", "failed"):
            gates = chain.from_iterable(found.get(name, ()) for name in stage.waits_for)
            if names := tuple(dict.fromkeys(gates)):
                found[stage.name] = names
    return found


def has_stopped(state: StageState) -> bool:
    """Whether it is that of a gate that has stopped the run."""
    return state.state == "failed" and state.cause.startswith(STOPPED_MARK)


def _next_action(stage: Stage, state: StageState, gates: Sequence[str]) -> str:
    if state.state == "done":
        return "is kept"
    if state.state == "stale":
        return f"is refused: {state.cause}"
    if state.state in ("running", "submitted"):
        return state.cause
    if has_stopped(state):
        return "stops again, unless it is overridden or something changes"
    if gates:
        return f"waits for {', '.join(gates)}"
    if stage.steps and state.step:
        return f"continues from step {state.step}"
    return f"starts, after {', '.join(stage.after)}" if stage.after else "starts"
