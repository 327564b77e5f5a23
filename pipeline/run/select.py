"""Selection of the stages that a command runs, and the checks on what it would build on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.config.validate import differing_keys
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.graph import Stage, matches
from pipeline.run.ledger import PUT_ASIDE
from pipeline.run.run import Run
from pipeline.run.states import StageState, as_done
from pipeline.text import say

# Settings that affect a stage's result only by rounding.
ENGINE_KEYS = (
    "count",
    "tensor",
    "placement",
    "max_sequences",
    "kv_cache_mebibytes",
    "start_timeout_seconds",
    "request_timeout_seconds",
    "hang_timeout_seconds",
    "max_restarts",
    "transport",
    "check_refit",
    "max_logprob_difference",
)
LOOP_KEYS = (
    "micro_batch_tokens",
    "checkpoint_every",
    "keep_last",
    "keep_best",
    "async_checkpoints",
)
LOOPS = ("cold_start", "domains.*", "mixed", "merge")

NON_INVALIDATING_KEYS = (
    "name",
    "rounds",
    "layout",
    "logging",
    "launch",
    "rewards",
    *(f"{stage}.guards" for stage in ("domains.*", "mixed")),
    *(f"engine.{key}" for key in ENGINE_KEYS),
    *(f"{stage}.loop.{key}" for stage in LOOPS for key in LOOP_KEYS),
)

MAY_CHANGE = f"""\
  logging
  launch
  layout
  rounds
  rewards: workers, timeout_seconds, memory_mebibytes, max_failed_fraction
  engine: {", ".join(ENGINE_KEYS[:6])},
          {", ".join(ENGINE_KEYS[6:10])},
          {", ".join(ENGINE_KEYS[10:])}
  every expert, mixed: guards
  every loop: {", ".join(LOOP_KEYS)}"""


class StaleStages(BraidError):
    """Finished or half-finished stages whose settings or inputs changed."""

    def __init__(self, run: Run, stale: dict[str, StageState]) -> None:
        lines = [f"{name}: {state.cause}" for name, state in stale.items()]
        super().__init__(
            "\n  ".join(["stale: settings or inputs changed:", *lines])
            + f"\nrestore what changed, or rerun with {rerun_options(run, stale)}, which also "
            f"reruns\neverything downstream; old outputs move to {shown(run.replaced)}"
        )


def check_selection(
    run: Run, only: Iterable[str], rerun: Sequence[str], reused: Collection[str] = ()
) -> None:
    """Raise BraidError where `only` or `rerun` names no stage, or one with missing dependencies.

    Dependencies are checked as they will be: the `reused` stages done, those to `rerun` pending.
    """
    wanted = run.chosen(only)
    run.chosen(rerun)
    # `check_stale` refuses stale stages.
    check_dependencies(wanted, as_done(planned_states(run, run.states, reused, rerun), "stale"))


def check_dependencies(
    wanted: Sequence[Stage],
    states: Mapping[str, StageState],
    remedy: str = "add them with --only, or run without --only",
) -> None:
    """Raise BraidError where a wanted stage depends on one that will not be done."""
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
        raise BraidError("\n".join(["missing dependencies:", *lines, remedy]))


def check_stale(run: Run, wanted: Sequence[Stage], *, record: bool = True) -> None:
    """Raise StaleStages where a wanted stage, or an input of one, is stale.

    `record` also writes the refusal into the ledger.
    """
    stale = stale_among(run.states, wanted)
    for name, state in stale.items() if record else ():
        run.ledger.append(name, "stale", state.cause, state.attempts)
    if stale:
        raise StaleStages(run, stale)


def check_settings(run: Run, rerun: Sequence[str] = ()) -> None:
    """Raise BraidError where stages have output of other settings and are not in `rerun`.

    `run` has the requested settings; its run.yaml has the settings of the output.
    """
    if not run.settings_file.exists():
        return
    differing = differing_keys(Run.read(run.path).settings, run.settings)
    if not differing:
        say(f"{shown(run.path)} was started with the same config: resuming it")
        return
    lines = [
        f"  {key}: {json.dumps(there)} there, {json.dumps(here)} here"
        for key, (there, here) in differing.items()
    ]
    stale = [name for name, state in run.states.items() if state.state == "stale"]
    if not set(stale) - {stage.name for stage in run.downstream(rerun)}:
        say(f"resuming {shown(run.path)} with other settings:", *lines)
        return
    if all(any(matches(key, each) for each in NON_INVALIDATING_KEYS) for key in differing):
        check_stale(run, run.stages, record=False)
    raise BraidError(
        "\n".join([f"{shown(run.path)} was started with a different config:", *lines])
        + f"\nthese finished or started stages depend on it: {', '.join(stale)}"
        + "\nchoose another name with --name NAME, resume with the original settings with "
        + f"`braid resume {shown(run.path)}`,\nor rerun the dependent stages with "
        + f"{rerun_options(run, stale)};\n"
        + f"without a rerun, only these settings may change:\n{MAY_CHANGE}"
    )


def planned_states(
    run: Run, states: Mapping[str, StageState], reused: Iterable[str], rerun: Iterable[str]
) -> dict[str, StageState]:
    """Return the states once the `reused` stages are done and those to `rerun` are put aside."""
    done = dict.fromkeys(reused, StageState("done"))
    pending = {stage.name: StageState("pending") for stage in run.downstream(rerun)}
    return {**states, **done, **pending}


def stale_among(states: Mapping[str, StageState], wanted: Sequence[Stage]) -> dict[str, StageState]:
    """Return the stale stages among the wanted ones and their inputs."""
    touched = {name for stage in wanted for name in (stage.name, *stage.inputs)}
    return {
        name: state for name, state in states.items() if name in touched and state.state == "stale"
    }


def rerun_options(run: Run, names: Iterable[str]) -> str:
    """Return the shortest list of `--from` options that rerun the named stages."""
    left, options = set(names), []
    for stage in run.stages:
        if stage.name in left:
            options.append(f"--from {stage.name}")
            left -= {each.name for each in run.downstream([stage.name])}
    return " ".join(options)


def put_aside(run: Run, stages: Iterable[Stage]) -> list[Path]:
    """Move the output of stages to `replaced/`, so that they start over; return the new paths."""
    moved = []
    for stage in stages:
        directory = run.stage(stage.name).path
        if not directory.exists():
            continue
        taken = [path.suffix[1:] for path in run.replaced.glob(f"{stage.name}.*")]
        number = 1 + max((int(each) for each in taken if each.isdecimal()), default=0)
        to = run.replaced / f"{stage.name}.{number}"
        to.parent.mkdir(exist_ok=True)
        directory.rename(to)
        run.ledger.append(stage.name, "pending", f"{PUT_ASIDE}{shown(to)}", 0)
        moved.append(to)
    run.refresh()
    return moved
