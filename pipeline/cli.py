"""The `braid` command: it parses the command line, runs one function and returns an exit code."""

from __future__ import annotations

import gc
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from parallel.errors import UserError, hint, nearest_name
from pipeline.commands.support import registry
from pipeline.text import open_streams, reason, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every error ends as one message on standard error."""
    open_streams()
    # Settings are trees of a hundred thousand objects that stay: at Python's threshold of 700 the
    # collector walks them again and again, half of the time of reading 1,000 domains.
    gc.set_threshold(200_000, 50)
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        # With --json nothing but the JSON goes to standard output.
        arguments.output = sys.stdout
        json = getattr(arguments, "json", False)
        with redirect_stdout(sys.stderr) if json else nullcontext():
            try:
                arguments.function(arguments)
            except ModuleNotFoundError as error:  # of a package that only this command needs
                raise _missing(error) from error
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output left, as `head` does; Python would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError) as error:
        notes: list[str] = getattr(error, "__notes__", [])
        say(f"braid: {reason(error)}", *notes, file=sys.stderr)
        return error.exit_code if isinstance(error, UserError) else 1
    return 0


def command_parser(word: str = "") -> ArgumentParser:
    """Return the parser of the command line, with the command `word`; with all, where none is so.

    Importing a command registers it. Importing all takes longer than many commands do.

    Raises:
        UserError: a package is missing, as outside the environment of `make install`.
    """
    try:
        registry.import_commands(word)
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return registry.parser()


def _missing(error: ModuleNotFoundError) -> UserError:
    """Return what to do about a package that is not here; raise the error where it is ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "pipeline", "stages", "parallel"):
        raise error
    return UserError(
        f"{sys.executable} has no package {package}: run braid in the environment that "
        "`make install` builds, with: source .venv/bin/activate"
    )


def _parse(argv: Sequence[str]) -> Namespace:
    braid = command_parser(argv[0] if argv else "")
    words = list(dict.fromkeys(name.partition(" ")[0] for name in registry.names()))
    if argv and not argv[0].startswith("-") and argv[0] not in words:
        say(f"braid: no command {argv[0]}; {hint(argv[0], words)}", file=sys.stderr)
        sys.exit(2)
    arguments, extras = braid.parse_known_args(argv)
    # argparse takes positional arguments in one piece: those after an option end up in `others`.
    plain = not any(extra.startswith("-") for extra in extras)
    if "--side-by-side" in " ".join(extras).replace("=", " ").split():
        braid.error("--side-by-side is now --parallel")
    several = ("overrides", "models", "others", "names")
    repeated = next((name for name in several if hasattr(arguments, name)), None)
    if plain and repeated:
        setattr(arguments, repeated, [*getattr(arguments, repeated), *extras])
    elif plain and len(extras) == 1 and arguments.command == "audit" and arguments.stage is None:
        [arguments.stage] = extras
    elif extras:
        usage = getattr(arguments, "parser", braid)  # of the command, which has fewer lines
        usage.error(f"unrecognized arguments: {' '.join(extras)}{_meant(arguments, extras)}")
    return arguments


def _meant(arguments: Namespace, extras: Sequence[str]) -> str:
    """Return the end of the message about unknown arguments: what may have been meant."""
    if arguments.command == "plan" and extras[0] in ("--fork", "--from", "--only"):
        return f"; braid run --dry-run takes {extras[0]}"
    misspelt = next((extra for extra in extras if extra.startswith("-")), extras[0])
    nearest = nearest_name(misspelt.partition("=")[0], getattr(arguments, "options", ()))
    return f"; {nearest}" if nearest else ""


if __name__ == "__main__":
    sys.exit(main())
