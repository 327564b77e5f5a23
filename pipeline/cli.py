"""The `braid` command: which function runs, and its exit code."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module

from pipeline.commands.arguments import parser
from pipeline.errors import BraidError, reason
from pipeline.text import encode_anything, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every failure ends as one message on standard error."""
    encode_anything()
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        _command(arguments.command)(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output left, as `head` does; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except BraidError as error:
        _report(error)
        return error.exit_code
    except OSError as error:
        _report(error)
        return 1
    return 0


def _report(error: Exception) -> None:
    notes: list[str] = getattr(error, "__notes__", [])
    say(f"braid: {reason(error)}", *notes, file=sys.stderr)


MODULES = {  # of the commands that are not in pipeline.commands.runs
    "status": "pipeline.commands.overview",
    **dict.fromkeys(("submit", "stage", "cancel"), "pipeline.commands.slurm"),
    **dict.fromkeys(("domain_new", "domain_check"), "pipeline.commands.domain"),
}


def _command(name: str) -> Callable[[Namespace], None]:
    # Imported here, so that `braid --help` and a mistyped command answer at once.
    try:
        module = import_module(MODULES.get(name, "pipeline.commands.runs"))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "pipeline", "stages", "parallel"):
            raise
        raise BraidError(
            f"{sys.executable} has no package {package}: run braid in the environment that "
            "`make install` builds, with: source .venv/bin/activate"
        ) from error
    found: Callable[[Namespace], None] = getattr(module, name)
    return found


def _parse(argv: Sequence[str]) -> Namespace:
    braid = parser()
    arguments, others = braid.parse_known_args(argv)
    # argparse takes positional arguments in one piece: those after an option end up here.
    plain = not any(other.startswith("-") for other in others)
    if plain and hasattr(arguments, "overrides"):
        arguments.overrides = [*arguments.overrides, *others]
    elif plain and len(others) == 1 and arguments.command == "audit" and arguments.stage is None:
        [arguments.stage] = others
    elif others:
        braid.error(f"unrecognized arguments: {' '.join(others)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
