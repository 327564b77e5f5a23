"""The command that edits a run: `braid mv`."""

from __future__ import annotations

from argparse import Namespace

from parallel.errors import UserError
from pipeline.commands.support.arguments import RUN, TRUST
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import find, read_run
from pipeline.config.yaml_core import dump
from pipeline.launch.runner import close_killed_attempts
from pipeline.run.directory import RunDirectory, check_owner
from pipeline.run.rename import Renaming, renaming, unfinished_renaming
from pipeline.slurm.queue import check_not_queued
from pipeline.text import say, shown


@command(
    "mv",
    "rename a block of a run's stages; its finished and half-finished work is kept",
    "  braid mv quickstart experts teachers               the block, and all stages of it\n"
    "  braid mv quickstart 'rl.{domain}' 'rlvr.{domain}'   its `as`\n\n"
    "Renames the stages' directories, their gates, and every reference in run.yaml, manifests and\n"
    "results. `seeded_as` keeps the old name, so random numbers stay as they are. Nothing\n"
    "becomes stale. The command prints what the configuration must say; with that, `braid run\n"
    "CONFIG` continues the run. Where a kill cut it short, the same command finishes it.\n"
    "See docs/how-to/edit-a-pipeline.md.",
    RUN,
    TRUST,
    Argument("old", metavar="OLD", help="the block's name, or its `as`"),
    Argument("new", metavar="NEW", help="the new one"),
    place=190,
)
def mv(arguments: Namespace) -> None:
    """Rename a block, or finish the renaming that was interrupted."""
    directory = find(arguments.runs_dir, arguments.run)
    check_owner(directory, arguments.trust_run)
    with RunDirectory(directory.path).lock():  # `Run.lock` refuses an unfinished renaming
        found = _asked(directory, arguments.old, arguments.new)
        found.finish(directory)
    names = ", ".join(f"{old} is now {new}" for old, new in found.stages.items())
    say(f"{shown(directory.path)}: {names or f'{found.old} is now {found.new}'}")
    say(*_instructions(found, directory))


def _asked(directory: RunDirectory, old: str, new: str) -> Renaming:
    """Return the renaming: the unfinished one, or the one that is asked for.

    Raises:
        UserError: another one is unfinished, the run has jobs in the queue, or a name is wrong.
    """
    left = unfinished_renaming(directory)
    if left is None:
        run = read_run(directory)
        check_not_queued(run)
        close_killed_attempts(run, run.stages)
        return renaming(run, old, new)
    if (left.old, left.new) != (old, new):
        raise UserError(
            f"{shown(directory.path)}: another renaming was interrupted; finish it first with: "
            f"braid mv {shown(directory.path)} {left.old} {left.new}"
        )
    return left


def _instructions(found: Renaming, run: RunDirectory) -> list[str]:
    """Return what the configuration must say for `braid run` to find the work."""
    lines = [f"in the configuration, rename {found.old} to {found.new}, and state:"]
    lines += [f"  {line}" for line in dump(found.edits).splitlines()]
    if found.new in found.settings["stages"]:
        lines.append(
            f"Where {found.old} comes from `extends`, set it to null and write the whole block as "
            f"{found.new}."
        )
    lines.append(f"Without a configuration: {run.resume_command()}")
    return lines
