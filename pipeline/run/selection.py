"""Which of a run's stages a command runs: all that are not done, some of them, or some anew."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.config.violations import hint, shown
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import PUT_ASIDE, Ledger, State
from pipeline.run.states import StageState, derive
from stages.settings import RunSettings


def chosen(run: RunDirectory, stages: Sequence[Stage], names: Iterable[str]) -> list[Stage]:
    """The stages so called, in the order of the graph; all where no names are given.

    Raises BraidError for a name that the run does not have.
    """
    known = {stage.name: stage for stage in stages}
    wanted = set(names)
    for name in sorted(wanted - known.keys()):
        raise BraidError(f"{shown(run.path)} has no stage {name}; {hint(name, known)}")
    return [stage for stage in stages if not wanted or stage.name in wanted]


def refuse_missing_inputs(
    wanted: Sequence[Stage],
    states: Mapping[str, StageState],
    remedy: str = "name those too with --only, or run without it",
) -> None:
    """Raise BraidError where a stage that is to run needs one that neither is done nor runs, or
    waits for such a gate."""
    running = {stage.name for stage in wanted}
    lines = [
        f"  {stage.name} {'waits for' if name in stage.after else 'needs'} {name}, which is "
        f"{states[name].state}"
        for stage in wanted
        if states[stage.name].state != "done"
        for name in stage.waits_for
        if states[name].state != "done" and name not in running
    ]
    if lines:
        heading = "stages lack what they are made from or wait for:"
        raise BraidError("\n".join([heading, *lines, remedy]))


def refuse_selection(
    run: RunDirectory,
    settings: RunSettings,
    only: Iterable[str],
    anew: Sequence[str],
    taken: Collection[str] = (),
) -> None:
    """Raise BraidError where `only` or `anew` names no stage, or one that will lack what it is made
    from once the stages `taken` stand there and those made `anew` are put aside."""
    stages = compile_graph(settings)
    wanted = chosen(run, stages, only)
    chosen(run, stages, anew)
    states = as_found(stages, derive(run, settings, stages), taken, anew)
    # What is stale is refused with a reason of its own.
    refuse_missing_inputs(wanted, as_done(states, "stale"))


def as_found(
    stages: Sequence[Stage],
    states: Mapping[str, StageState],
    taken: Iterable[str],
    anew: Iterable[str],
) -> dict[str, StageState]:
    """The states once the stages `taken` stand there, and then those made `anew` and all that
    follows them are put aside."""
    done = dict.fromkeys(taken, StageState("done"))
    pending = {stage.name: StageState("pending") for stage in following(stages, anew)}
    return {**states, **done, **pending}


def as_done(states: Mapping[str, StageState], *these: State) -> dict[str, StageState]:
    """The states, with those that are one of `these` taken for done."""
    return {
        name: StageState("done") if state.state in these else state
        for name, state in states.items()
    }


def following(stages: Sequence[Stage], names: Iterable[str]) -> list[Stage]:
    """The stages so called, and all that are made from them, in the order of the graph."""
    found = set(names)
    for stage in stages:  # inputs come first
        if found & set(stage.inputs):
            found.add(stage.name)
    return [stage for stage in stages if stage.name in found]


def to_make_anew(stages: Sequence[Stage], names: Iterable[str]) -> str:
    """The options that make the stages so called anew, no more of them than it takes."""
    left, options = set(names), []
    for stage in stages:
        if stage.name in left:
            options.append(f"--from {stage.name}")
            left -= {each.name for each in following(stages, [stage.name])}
    return " ".join(options)


def put_aside(run: RunDirectory, stages: Iterable[Stage]) -> list[Path]:
    """Move what stages have left to `replaced/`, so that they begin anew; returns where it is."""
    moved = []
    for stage in stages:
        folder = run.stage(stage.name).path
        if not folder.exists():
            continue
        taken = [path.suffix[1:] for path in run.replaced.glob(f"{stage.name}.*")]
        number = 1 + max((int(each) for each in taken if each.isdecimal()), default=0)
        to = run.replaced / f"{stage.name}.{number}"
        to.parent.mkdir(exist_ok=True)
        folder.rename(to)
        Ledger(run.ledger).append(stage.name, "pending", f"{PUT_ASIDE}{shown(to)}", 0)
        moved.append(to)
    return moved
