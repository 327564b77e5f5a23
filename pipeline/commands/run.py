"""The command that runs a configuration: `braid run`."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.commands.support import starting
from pipeline.commands.support.arguments import CONFIG_HELP, JSON, PARALLEL, STARTING, print_json
from pipeline.commands.support.configuration import (
    check_machine,
    forked,
    load_configured_run,
    warn_of_graph,
)
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.starting import reuse_from, start_stages
from pipeline.launch.placement import Programs
from pipeline.report import status as report
from pipeline.report.status import next_action
from pipeline.report.time_left import Estimate, blocked, estimate
from pipeline.run.bundle.reproduce import compare, foreseen
from pipeline.run.directory import check_owner, warn_of_readers
from pipeline.run.edits import moved_lines
from pipeline.run.former import move_renamed
from pipeline.run.ledger import took
from pipeline.run.run import Run, StageState
from pipeline.run.select import (
    StaleStages,
    check_selection,
    check_settings,
    planned_states,
    stale_among,
)
from pipeline.slurm.queue import check_not_queued, states_now
from pipeline.text import say, warn
from stages.directory import EngineDirectory


@command(
    "run",
    "run a configuration on this machine",
    CONFIG_HELP + "  braid run configs/quickstart.yaml\n"
    "  braid run configs/quickstart.yaml --name no-kl "
    "domains.spell_backward.objective.kl.coefficient=0\n\n"
    "The run's directory is runs/NAME. The same command again resumes the run: no finished stage\n"
    "runs twice. Under the same name, a different config is refused where it would change\n"
    "finished stages; --from reruns those. `braid resume --help` lists what may always differ.\n\n"
    "  braid run configs/quickstart.yaml --only cold_start --only experts.chain_sum\n"
    "  braid run configs/quickstart.yaml domains.chain_sum.loop.steps=80 --from experts.chain_sum\n"
    "  braid run configs/quickstart.yaml --name no-kl --fork quickstart "
    "domains.spell_backward.objective.kl.coefficient=0\n\n"
    "  braid run quickstart.tar.gz --runs-dir elsewhere\n"
    "reproduces the run of a bundle (`braid bundle`) and compares the outputs of its stages.\n\n"
    "JSON, at the end: as `braid status RUN --json`; with --dry-run as `braid plan CONFIG --json`\n"
    'and "commands": {"engines": [COMMAND], "ranks": {STAGE: COMMAND}}.',
    Argument(
        "--dry-run",
        action="store_true",
        help="show the plan and the commands of these options, and run nothing",
    ),
    PARALLEL,
    JSON,
    *STARTING,
    place=130,
)
def run(arguments: Namespace) -> None:
    """Run the configuration, or resume the run of it."""
    run = load_configured_run(arguments)
    warn_of_graph(arguments, run.settings)
    check_owner(run, arguments.trust_run)
    other, fork = forked(arguments, run)
    check_selection(run, arguments.only, arguments.rerun, fork.reused)
    check_machine(run, arguments, fork.reused)
    # Before the lock, which creates the run's directory.
    if arguments.dry_run:
        _show_dry_run(run, arguments, fork.reused)
        return
    warn_of_readers(run)
    if arguments.bundle is not None:
        warn(foreseen(arguments.bundle, run))
    # The lock reads the run again, so the checks below see what another launcher left.
    with run.lock():
        check_not_queued(run)
        check_settings(run, arguments.rerun, moved_lines)
        run.write_settings()
        move_renamed(run)
        if other is not None:
            reuse_from(run, other)
        start_stages(run, arguments)
    if arguments.bundle is not None:
        say(*compare(arguments.bundle, run.refresh(), arguments.only))


def _show_dry_run(run: Run, arguments: Namespace, reused: Mapping[str, str]) -> None:
    check_not_queued(run)
    check_settings(run, arguments.rerun, moved_lines)
    only, parallel = arguments.only, arguments.parallel
    preview = dry_run(run, starting.PROGRAMS, reused, only, arguments.rerun, parallel)
    plan = run, preview.states, preview.actions, preview.left
    if arguments.json:
        commands = {"engines": preview.engines, "ranks": preview.ranks}
        print_json(arguments, {**report.plan_json(*plan), "commands": commands})
        return
    print(report.plan_text(*plan), end="\n\n")
    if not preview.ranks:
        say("no command: nothing would start")
        return
    members = run.settings.engine.members
    for index, line in enumerate(preview.engines):
        say(f"engine {members[index % len(members)]}: {line}")
    say(f"every stage, as ranks 0 to {run.settings.layout.ranks - 1}:")
    say(*(f"  {line}" for line in preview.ranks.values()))


@dataclass(frozen=True)
class DryRun:
    """A `braid run` that changes nothing: its plan and its commands.

    `states` and `actions` are every stage's, `engines` the commands of the engines, `ranks` those
    of a rank of each stage that would start.
    """

    states: dict[str, StageState]
    actions: dict[str, str]
    left: Estimate
    engines: list[str]
    ranks: dict[str, str]


def dry_run(
    run: Run,
    programs: Programs,
    reused: Mapping[str, str],
    only: Collection[str],
    rerun: Collection[str],
    parallel: int,
) -> DryRun:
    """Return what `braid run` would do with these options.

    Stages `reused` from another run count as done, with their ledger's cause; those of `rerun` and
    everything downstream as moved to replaced/; with `only`, other stages are left out.

    Raises:
        StaleStages: the command would refuse a stale input of a wanted stage.
    """
    states = planned_states(run, states_now(run), reused, rerun)
    again = {stage.name for stage in run.downstream(rerun)}
    selected = run.chosen(only)
    names = {stage.name for stage in selected}
    if stale := stale_among(states, selected):
        raise StaleStages(run, stale)
    actions = next_action(run.stages, states)
    for name, text in actions.items():
        aside = name in again and run.stage(name).path.exists()
        if name in reused and name not in again:
            actions[name] = f"is {reused[name]}"
        elif name not in names and states[name].state != "done":
            actions[name] = f"is {'put aside, and ' if aside else ''}left out by --only"
        elif aside:
            actions[name] = f"is put aside, and {text}"
    cannot, ranks, samples = blocked(run.stages, states), {}, False
    for stage in selected:
        if stage.name not in cannot and states[stage.name].state in ("pending", "failed"):
            directory, samples = run.stage(stage.name), samples or stage.needs_engine
            attempts = 0 if stage.name in again else directory.attempts()
            ranks[stage.name] = shlex.join(programs.stage(directory.job(attempts + 1)))
    engines = [
        shlex.join(programs.engine(EngineDirectory(directory / member).job))
        for directory in run.engines_of_slots(parallel)
        for member in (run.settings.engine.members if samples else ())
    ]
    left = estimate(run, states, took(run.events), names)
    return DryRun(states, actions, left, engines, ranks)
