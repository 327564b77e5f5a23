"""The registry of commands: each function with its arguments and the help that teaches them."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from argparse import RawDescriptionHelpFormatter as Raw
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
"""

LARGEST = 10**18 - 1  # fits a file's name, and 64 bits

Function = Callable[[Namespace], None]


class Argument:
    """One argument of a command, as argparse's `add_argument` takes it."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names, self.options = names, options

    def add_to(self, parser: ArgumentParser) -> None:
        """Add the argument to a parser."""
        parser.add_argument(*self.names, **self.options)


@dataclass(frozen=True)
class OneOf:
    """Arguments that exclude one another."""

    arguments: tuple[Argument, ...]

    def add_to(self, parser: ArgumentParser) -> None:
        """Add the arguments to a parser."""
        group = parser.add_mutually_exclusive_group()
        for each in self.arguments:
            group.add_argument(*each.names, **each.options)


@dataclass(frozen=True)
class Command:
    """A command: its function, its arguments and its help."""

    function: Function
    summary: str
    details: str
    arguments: tuple[Argument | OneOf, ...]


COMMANDS: dict[str, Command] = {}  # `gate override` is the action `override` of `gate`
GROUPS: dict[str, tuple[str, str]] = {}  # of commands with actions: summary and details


def command(
    name: str, summary: str, details: str, *arguments: Argument | OneOf
) -> Callable[[Function], Function]:
    """Register the decorated function as the command `name`."""

    def register(function: Function) -> Function:
        COMMANDS[name] = Command(function, summary, details, arguments)
        return function

    return register


def parser() -> ArgumentParser:
    """Return the parser of the whole command line; it sets `function` to a command's."""
    braid = ArgumentParser("braid", description=DESCRIPTION, epilog=EXIT_CODES, formatter_class=Raw)
    commands = braid.add_subparsers(dest="command", metavar="COMMAND", required=True)
    actions: dict[str, Any] = {}
    for name, each in COMMANDS.items():
        group, _, action = name.rpartition(" ")
        if group and group not in actions:
            added = _add(commands, group, *GROUPS[group])
            _add_runs_dir(added, Path("runs"))
            actions[group] = added.add_subparsers(metavar="ACTION", required=True)
        added = _add(actions[group] if group else commands, action, each.summary, each.details)
        # An action overrides --runs-dir of its group, which may stand before the action.
        _add_runs_dir(added, SUPPRESS if group else Path("runs"))
        for argument in each.arguments:
            argument.add_to(added)
        added.set_defaults(function=each.function)
    return braid


def whole(text: str) -> int:
    """Return a whole number from 0; raise ArgumentTypeError for anything else."""
    if not _is_number(text):
        raise ArgumentTypeError(f"{text[:40]} is not a number from 0 to {LARGEST}")
    return int(text)


def positive(text: str) -> int:
    """Return a whole number from 1; raise ArgumentTypeError for anything else."""
    if not _is_number(text) or not int(text):
        raise ArgumentTypeError(f"{text[:40]} is not a number from 1 to {LARGEST}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST))


def _add(commands: Any, name: str, summary: str, details: str) -> ArgumentParser:
    description = f"{summary[0].upper()}{summary[1:]}."
    added: ArgumentParser = commands.add_parser(
        name, help=summary, description=description, epilog=details, formatter_class=Raw
    )
    return added


def _add_runs_dir(parser: ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--runs-dir", type=Path, default=default, help="the directory of all runs (default: runs)"
    )
