"""The command on bundles: `braid bundle`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from parallel.errors import UserError
from pipeline.commands.support.arguments import RUN
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_run
from pipeline.run.bundle.reproduce import bundle_at, compare
from pipeline.run.bundle.writer import has_finished, write_bundle
from pipeline.text import say, shown


@command(
    "bundle",
    "write all that another machine needs to reproduce a run; or compare a run with it",
    "  braid bundle quickstart                               quickstart.tar.gz\n"
    "  braid bundle quickstart --to quickstart-bundle --weights copy\n"
    "  braid run quickstart.tar.gz --runs-dir elsewhere       reproduce it, and compare\n"
    "  braid bundle --check quickstart quickstart.tar.gz      compare later\n\n"
    "A bundle has the configuration, the data files and the tokenizer, and in bundle.json the\n"
    "digest of every input and of every stage's output, the lineage, code and versions of every\n"
    "stage, the reasons of early stops, gates and overrides, and the commands that reproduce it.\n"
    "Weights from outside the run are named by path and digest; --weights copy copies them.\n"
    "Files of API keys are named, never copied. See docs/how-to/bundle.md.\n\n"
    "--check exits with 1 where an output differs; it names the first stage that does, and what\n"
    "differs in its lineage. Only runs with deterministic: true can be compared.",
    Argument("--check", action="store_true", help="compare the run with BUNDLE; write nothing"),
    Argument(
        "--to",
        type=Path,
        metavar="PATH",
        help="an archive PATH.tar.gz, or a directory (default: RUN.tar.gz)",
    ),
    Argument(
        "--weights",
        choices=("reference", "copy"),
        default="reference",
        help="weights from outside the run: by path and digest, or copied (default: reference)",
    ),
    RUN,
    Argument("bundle", metavar="BUNDLE", nargs="?", type=Path, help="with --check: the bundle"),
    place=200,
)
def bundle(arguments: Namespace) -> None:
    """Write the bundle of a run, or compare a run with one."""
    run = load_run(arguments)
    if arguments.check != (arguments.bundle is not None):
        raise UserError("braid bundle --check RUN BUNDLE compares; braid bundle RUN writes")
    if arguments.check:
        if (original := bundle_at(arguments.bundle)) is None:
            raise UserError(f"{shown(arguments.bundle)}: no bundle there")
        say(*compare(original, run))
        return
    if run.is_running():
        raise UserError(f"{shown(run.path)} is running; bundle it when it has ended")
    to = write_bundle(run, arguments.to or Path(f"{run.name}.tar.gz"), arguments.weights)
    say(f"{shown(to)}: reproduce it with: braid run {shown(to)}")
    if left := [name for name, state in run.states.items() if not has_finished(state)]:
        say(f"not finished or stale, so without an output to compare: {', '.join(left)}")
    if not run.settings.deterministic:
        say("the run is not deterministic: true, so its digests cannot be compared")
