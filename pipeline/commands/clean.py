"""The command that lists and deletes what nothing needs any more: `braid clean`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.commands.support.arguments import JSON, TRUST, print_json
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import find, read_run, run_paths
from pipeline.run.directory import RunDirectory, check_owner
from pipeline.run.leftovers import Leftover, delete, leftovers, started_from
from pipeline.run.run import Run
from pipeline.tables import table
from pipeline.text import human, say, shown, while_slow


@dataclass(frozen=True)
class _Cleaning:
    """A run, and what nothing in it needs."""

    run: Run
    leftovers: Sequence[Leftover]

    @property
    def freed_bytes(self) -> int:
        return sum(leftover.freed_bytes for leftover in self.leftovers)


@command(
    "clean",
    "list what nothing needs any more of runs, and with --yes delete it",
    "  braid clean quickstart          what it would delete, with its bytes; deletes nothing\n"
    "  braid clean quickstart --yes\n"
    "  braid clean math code --yes\n\n"
    "It lists outputs of stages from before they were rerun (replaced/), checkpoints of finished\n"
    "stages before the newest, and what a kill left half written. It leaves what a resume, a\n"
    "report, a gate, `braid look` or `braid audit` reads, checkpoints that any run beside it has\n"
    "started from, and those of `loop.keep_best`. A checkpoint that is gone can no longer be\n"
    "exported or evaluated with --step.\n\n"
    'JSON: {"deleted": BOOL, "runs": [{"run", "bytes", "leftovers": [{"path", "why",\n'
    '"bytes"}]}]}.',
    Argument("names", metavar="RUN", nargs="+", help="a run's name or directory"),
    Argument("--yes", action="store_true", help="delete what is listed"),
    TRUST,
    JSON,
    place=185,
)
def clean(arguments: Namespace) -> None:
    """List what nothing needs of each run, and delete it with `--yes`."""
    directories = [find(arguments.runs_dir, name) for name in dict.fromkeys(arguments.names)]
    cleanings = []
    for directory in directories:
        check_owner(directory, arguments.trust_run)
        run = read_run(directory)
        if not arguments.yes:
            cleanings.append(_examine(run, arguments))
            continue
        with run.lock():  # no stage starts from a checkpoint that is being deleted
            cleaning = _examine(run.refresh(), arguments)
            for leftover in cleaning.leftovers:
                delete(leftover)
        cleanings.append(cleaning)
    if arguments.json:
        runs = [_as_json(cleaning) for cleaning in cleanings]
        print_json(arguments, {"deleted": arguments.yes, "runs": runs})
        return
    for cleaning in cleanings:
        _print(cleaning, arguments.yes)
    if not arguments.yes and any(cleaning.leftovers for cleaning in cleanings):
        say("nothing is deleted; add --yes to delete these")


def _examine(run: Run, arguments: Namespace) -> _Cleaning:
    """Return what nothing in a run needs; a fork of it, too, may have started from a checkpoint."""
    with while_slow(f"looking through {shown(run.path)}"):
        beside = {run.path, *run_paths(run.path.parent), *run_paths(arguments.runs_dir)}
        in_use = started_from(RunDirectory(path) for path in beside)
        return _Cleaning(run, [*leftovers(run, in_use)])


def _print(cleaning: _Cleaning, deleted: bool) -> None:
    where = shown(cleaning.run.path)
    if not cleaning.leftovers:
        say(f"{where}: nothing to delete")
        return
    rows = [
        [
            str(leftover.path.relative_to(cleaning.run.path)),
            human(leftover.freed_bytes),
            leftover.why,
        ]
        for leftover in cleaning.leftovers
    ]
    title = f"{where}: {human(cleaning.freed_bytes)}{' deleted' if deleted else ''}"
    print(table(title, ("path", "size", "what it is"), rows, right=(1,)))


def _as_json(cleaning: _Cleaning) -> dict[str, object]:
    return {
        "run": str(cleaning.run.path),
        "bytes": cleaning.freed_bytes,
        "leftovers": [
            {"path": str(leftover.path), "why": leftover.why, "bytes": leftover.freed_bytes}
            for leftover in cleaning.leftovers
        ],
    }
