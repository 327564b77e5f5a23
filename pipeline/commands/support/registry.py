"""The registry of commands, and the parser of the command line that it makes.

A command is found by its file: `braid NAME` is `pipeline/commands/NAME.py`. No list names them.
"""

from __future__ import annotations

import pkgutil
import platform
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from argparse import RawDescriptionHelpFormatter as Raw
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline import commands

EXIT_CODES = """\
exit codes:
  0    done
  1    an error, in one message: what is wrong, where, and how to fix it
  2    a usage error on the command line
  130  stopped by Ctrl-C; 143 by SIGTERM. `braid resume` continues the run.
"""
DESCRIPTION = """\
Post-train a mixture-of-experts model: one cold start, one expert per domain grown from it, and one
model braided back out of the experts.

a first run, from its settings to its results:
  braid doctor                               can this machine run it?
  braid validate configs/quickstart.yaml     is the configuration right?
  braid plan configs/quickstart.yaml         which stages run, and from what?
  braid run configs/quickstart.yaml          run it here, with progress and a table of results
  braid status quickstart                    how far is it? (from another terminal)
  braid resume quickstart                    continue after a crash, a kill or Ctrl-C
  braid look quickstart                      does it learn? curves and samples
  braid compare quickstart                   gains, what was forgotten, costs
  braid report quickstart                    all of it, as one HTML file
"""
Function = Callable[[Namespace], None]


class Argument:
    """One argument of a command, as argparse's `add_argument` takes it."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names, self.options = names, options


# The arguments of an inner tuple exclude each other.
Arguments = tuple[Argument | tuple[Argument, ...], ...]


@dataclass(frozen=True)
class Command:
    """A command: its function, its help, its arguments, and its place in the list of commands."""

    function: Function
    summary: str
    details: str
    arguments: Arguments
    place: int


@dataclass(frozen=True)
class CommandGroup:
    """A word before commands, such as `gate` of `gate override`: its help and its place."""

    summary: str
    details: str
    place: int


COMMANDS: dict[str, Command] = {}  # `gate override` is the action `override` of `gate`
GROUPS: dict[str, CommandGroup] = {}  # by the word before the actions
LAST = 1000  # the place of a command that states none


def command(
    name: str,
    summary: str,
    details: str,
    *arguments: Argument | tuple[Argument, ...],
    place: int = LAST,
) -> Callable[[Function], Function]:
    """Register the decorated function as the command `name`.

    Args:
        name: the word after `braid`; or two, a group's and an action's.
        summary: its line in `braid --help`, which starts in lower case and has no full stop.
        details: what `braid NAME --help` prints below the options: examples, and the JSON.
        arguments: in the order of its help; those of an inner tuple exclude each other.
        place: commands are listed from the lowest place, and those of one place by name. Without
            one the command stands last. An action stands in its group, in the order of its file.
    """

    def register(function: Function) -> Function:
        COMMANDS[name] = Command(function, summary, details, arguments, place)
        return function

    return register


def group(name: str, summary: str, details: str, place: int = LAST) -> None:
    """Register a word before commands; `summary`, `details` and `place` are as in `command`."""
    GROUPS[name] = CommandGroup(summary, details, place)


def import_commands(word: str = "") -> None:
    """Import the command `word`, or every command, which registers it; `support` has none.

    Raises:
        ModuleNotFoundError: a package is missing, as outside the environment of `make install`.
    """
    files = [module.name for module in pkgutil.iter_modules(commands.__path__) if not module.ispkg]
    for file in [word] if word in files else files:
        import_module(f"{commands.__name__}.{file}")


def parser() -> ArgumentParser:
    """Return the parser of the whole command line.

    It sets `function` to a command's, `parser` to the command's own, and `options` to its options.
    """
    braid = ArgumentParser("braid", description=DESCRIPTION, epilog=EXIT_CODES, formatter_class=Raw)
    braid.add_argument(
        "--version",
        action=_PrintVersions,
        nargs=0,
        help="print the revision and the packages' versions",
    )
    subparsers = _subparsers(braid, "COMMAND", dest="command")
    actions: dict[str, Any] = {}
    # Not in the order of the registry: whoever imports one module first registers its commands
    # first.
    for name in names():
        registered = COMMANDS[name]
        word, _, action = name.rpartition(" ")
        if word and word not in actions:
            added = _add(subparsers, word, GROUPS[word])
            _add_runs_dir(added, Path("runs"))
            actions[word] = _subparsers(added, "ACTION")
        added = _add(actions[word] if word else subparsers, action, registered)
        # An action overrides --runs-dir of its group, which may stand before the action.
        _add_runs_dir(added, SUPPRESS if word else Path("runs"))
        options = ["--help", "--runs-dir"]
        for argument in registered.arguments:
            target: Any = added
            if isinstance(argument, tuple):
                target = added.add_mutually_exclusive_group()
            for one in argument if isinstance(argument, tuple) else (argument,):
                target.add_argument(*one.names, **one.options)
                options += [name for name in one.names if name.startswith("--")]
        added.set_defaults(function=registered.function, parser=added, options=options)
    return braid


def names() -> list[str]:
    """Return the names of the imported commands, in the order of `braid --help`.

    The sort is stable, which keeps the actions of a group in the order of their file.
    """
    return sorted(COMMANDS, key=_place)


def _place(name: str) -> tuple[int, str]:
    word = name.partition(" ")[0]
    return GROUPS[word].place if word in GROUPS else COMMANDS[name].place, word


def _add(subparsers: Any, name: str, registered: Command | CommandGroup) -> ArgumentParser:
    summary = registered.summary
    added: ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=registered.details,
        formatter_class=Raw,
    )
    return added


class _PrintVersions(Action):
    """Print the versions that decide a result, as a bug report needs them."""

    def __call__(self, parser: ArgumentParser, *_: Any) -> None:
        # Importing these takes longer than most commands' parsers.
        from pipeline.run.lineage import code_revision, package_versions

        print(f"braid {version('braid')}, revision {code_revision()}")
        print(f"Python {platform.python_version()}")
        for package, installed in package_versions().items():
            print(f"{package} {installed}")
        parser.exit()


def _subparsers(parser: ArgumentParser, metavar: str, **options: Any) -> Any:
    """Add subcommands to a parser, which prints its help where none is given: a usage error."""

    def usage(_: Namespace) -> None:
        parser.print_help(sys.stderr)
        parser.exit(2)

    parser.set_defaults(function=usage)
    return parser.add_subparsers(metavar=metavar, **options)


def _add_runs_dir(parser: ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--runs-dir", type=Path, default=default, help="the directory of all runs (default: runs)"
    )
