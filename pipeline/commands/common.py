"""The registry of commands, the arguments that several of them take, and the run that they name."""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from argparse import RawDescriptionHelpFormatter as Raw
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from parallel.errors import UserError, hint
from pipeline.config.ancestors import ancestor_cautions
from pipeline.config.tokenizers import template_cautions
from pipeline.config.unroll import pairless, unread, unread_keys
from pipeline.config.validate import (
    load,
    load_cluster,
    load_started,
    load_unfinished,
    located,
)
from pipeline.estimate.gpu_memory import GpusOf, gpus_here, gpus_of
from pipeline.launch.placement import Programs
from pipeline.run.answers import MeasuredModel, measured_models
from pipeline.run.bundle.reproduce import bundle_at
from pipeline.run.directory import TRUST_OPTION, RunDirectory, check_owner
from pipeline.run.run import Run
from pipeline.run.select import (
    RunFork,
    check_run_directory,
    dated,
    find_fork,
    put_aside,
    reuse_stages,
    to_start,
)
from pipeline.text import say, shown, visible, warn
from stages.settings import RunSettings

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


# The arguments of an inner tuple exclude each other.
Arguments = tuple[Argument | tuple[Argument, ...], ...]


@dataclass(frozen=True)
class Command:
    """A command: its function, its help and its arguments."""

    function: Function
    summary: str
    details: str
    arguments: Arguments


# Of commands, in the order of the help.
MODULES = (
    "look",
    "see",
    "report",
    "compare",
    "init",
    "simulate",
    "run",
    "bundle",
    "domain",
    "slurm",
)
COMMANDS: dict[str, Command] = {}  # `gate override` is the action `override` of `gate`
GROUPS: dict[str, tuple[str, str]] = {}  # of commands with actions: summary and details


def command(
    name: str, summary: str, details: str, *arguments: Argument | tuple[Argument, ...]
) -> Callable[[Function], Function]:
    """Register the decorated function as the command `name`."""

    def register(function: Function) -> Function:
        COMMANDS[name] = Command(function, summary, details, arguments)
        return function

    return register


def parser() -> ArgumentParser:
    """Return the parser of the whole command line.

    It sets `function` to a command's, `parser` to the command's own, and `options` to its options.
    """
    braid = ArgumentParser("braid", description=DESCRIPTION, epilog=EXIT_CODES, formatter_class=Raw)
    commands = _subparsers(braid, "COMMAND", dest="command")
    actions: dict[str, Any] = {}
    # By module, since whoever imports one module first registers its commands first.
    for name, each in sorted(COMMANDS.items(), key=lambda item: _place(item[1])):
        group, _, action = name.rpartition(" ")
        if group and group not in actions:
            added = _add(commands, group, *GROUPS[group])
            _add_runs_dir(added, Path("runs"))
            actions[group] = _subparsers(added, "ACTION")
        added = _add(actions[group] if group else commands, action, each.summary, each.details)
        # An action overrides --runs-dir of its group, which may stand before the action.
        _add_runs_dir(added, SUPPRESS if group else Path("runs"))
        options = ["--help", "--runs-dir"]
        for argument in each.arguments:
            target: Any = added
            if isinstance(argument, tuple):
                target = added.add_mutually_exclusive_group()
            for one in argument if isinstance(argument, tuple) else (argument,):
                target.add_argument(*one.names, **one.options)
                options += [name for name in one.names if name.startswith("--")]
        added.set_defaults(function=each.function, parser=added, options=options)
    return braid


def _place(registered: Command) -> int:
    return MODULES.index(registered.function.__module__.rpartition(".")[2])


def whole(text: str, least: int = 0) -> int:
    """Return a whole number from `least`; raise ArgumentTypeError for anything else."""
    number = text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST))
    if not number or int(text) < least:
        raise ArgumentTypeError(f"{text[:40]} is not a number from {least} to {LARGEST}")
    return int(text)


def positive(text: str) -> int:
    """Return a whole number from 1; raise ArgumentTypeError for anything else."""
    return whole(text, 1)


def number_within(name: str, within: Callable[[float], bool]) -> Callable[[str], float]:
    """Return an argument's type: a number that is `within` the bounds stated by `name`.

    It raises ArgumentTypeError for anything else.
    """

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan  # which is within no bounds
        if not within(value):
            raise ArgumentTypeError(f"{text} is no {name}")
        return value

    return parsed


def _add(commands: Any, name: str, summary: str, details: str) -> ArgumentParser:
    description = f"{summary[0].upper()}{summary[1:]}."
    added: ArgumentParser = commands.add_parser(
        name, help=summary, description=description, epilog=details, formatter_class=Raw
    )
    return added


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


PROGRAMS = Programs()

RUN = Argument("run", metavar="RUN", help="the run's name or directory")
STAGE = Argument("stage", metavar="STAGE", help="the stage's name, as `braid status` shows it")
JSON = Argument("--json", action="store_true", help="print JSON on standard output, and only that")
GPUS = Argument(
    "--cluster",
    type=Path,
    metavar="FILE",
    help="a cluster's profile, for its nodes and their GPUs (default: this machine's GPUs)",
)
STEP = Argument(
    "--step",
    metavar="N",
    type=whole,
    help="the stage's checkpoint of this step, finished or not (default: the newest checkpoint of "
    "a finished stage)",
)
TRUST = Argument(
    TRUST_OPTION,
    action="store_true",
    help="work on the run although other users own it or may write to it",
)
PARALLEL = Argument(
    "--parallel",
    metavar="N",
    type=positive,
    default=1,
    help="run at most N stages at a time, each on its share of the CPU cores, with its own engines",
)
SELECTION = (
    Argument(
        "--only",
        metavar="STAGE",
        action="append",
        default=[],
        help="run only this stage, e.g. experts.math (repeatable)",
    ),
    Argument(
        "--from",
        dest="rerun",
        metavar="STAGE",
        action="append",
        default=[],
        help="rerun this stage and everything downstream; old outputs move to replaced/ "
        "(repeatable)",
    ),
)
CONFIG = (
    Argument("config", type=Path, metavar="CONFIG", help="the run's YAML file, or a bundle"),
    Argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="override a key of the file"
    ),
    Argument("--name", help="the run's name (default: the configuration's)"),
)
STARTING = (
    *SELECTION,
    Argument(
        "--fork",
        metavar="OTHER_RUN",
        help="reuse its finished stages whose settings, data and inputs are identical",
    ),
    TRUST,
    Argument(
        "--check-refit",
        dest="implied",
        action="append_const",
        const="engine.check_refit=true",
        default=[],
        help="compare every engine tensor with the trainer's, by checksum, after each weight sync: "
        "engine.check_refit=true",
    ),
    *CONFIG,
)
CONFIG_HELP = """\
CONFIG is a YAML file. Override any key on the command line, as dotted.key=value; a block merges
with the file's, and a mapping of names to values, such as weights, replaces the file's:
"""


def print_json(arguments: Namespace, value: Any) -> None:
    """Print a value on standard output, which `--json` keeps free of all else.

    A number that is not finite, which JSON lacks, is null.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=2)
    print(text, file=arguments.output)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def find(runs_dir: Path, name: str) -> RunDirectory:
    """Return the run of a name or directory; raise UserError where there is none."""
    for path in (runs_dir / name, Path(name)):
        if (run := RunDirectory(path)).settings_file.exists():
            return run
    known = [visible(path.name) for path in run_paths(runs_dir)]
    raise UserError(f"no run {visible(name)} in {shown(runs_dir)}; {hint(name, known)}")


def run_paths(runs_dir: Path) -> list[Path]:
    """Return the directories of all runs."""
    return sorted(settings.parent for settings in runs_dir.glob("*/run.yaml"))


def read_run(directory: RunDirectory) -> Run:
    """Return the run in a directory that has a run.yaml, to show it.

    Raises:
        ConfigError: run.yaml cannot be read. That its stages could not start is no such error.
    """
    return Run(directory.path, load_started(directory.settings_file))


def load_run(arguments: Namespace) -> Run:
    """Return the run that the arguments name."""
    return read_run(find(arguments.runs_dir, arguments.run))


def measured(arguments: Namespace, run: Run, name: str) -> MeasuredModel:
    """Return a model that the run's evaluations have measured, or another run's: OTHER_RUN/MODEL.

    Raises:
        UserError: it has not been measured.
    """
    own = measured_models(run)
    other, slash, model = name.rpartition("/")
    if name not in own and slash:
        run = read_run(find(arguments.runs_dir, other))
        own, name = measured_models(run), model
    if name not in own:
        where = shown(run.path)
        raise UserError(f"no model {name} in {where} has been measured; {hint(name, own)}")
    return own[name]


def load_trusted_run(arguments: Namespace) -> Run:
    """Return the run that the arguments name, to work on what it has.

    Raises:
        UserError: other users may have written it, and it is not trusted.
    """
    run = find(arguments.runs_dir, arguments.run)
    check_owner(run, arguments.trust_run)
    return read_run(run)


def load_run_to_start(
    arguments: Namespace, only: Collection[str], rerun: Collection[str] = ()
) -> Run:
    """Return the run that the arguments name, to start its unfinished stages.

    `only` names the stages to start, `rerun` those to start again.

    Raises:
        ConfigError: with every violation that these stages meet.
        UserError: other users may have written the run, and it is not trusted.
    """
    directory = find(arguments.runs_dir, arguments.run)
    check_owner(directory, arguments.trust_run)

    def starting(settings: RunSettings) -> set[str]:
        return to_start(Run(directory.path, settings), only, rerun)

    return Run(directory.path, load_unfinished(directory.settings_file, (), starting))


def load_configured_run(arguments: Namespace) -> Run:
    """Return the run of the configuration that the arguments name.

    Raises:
        UserError: the configuration belongs to a run in another directory.
    """
    only, rerun = getattr(arguments, "only", ()), getattr(arguments, "rerun", ())

    def starting(settings: RunSettings) -> set[str] | None:
        run = dated(Run(arguments.runs_dir / settings.name, settings))
        return to_start(run, only, rerun) if run.settings_file.exists() else None

    settings = load_config(arguments, starting=starting)
    run = Run(arguments.runs_dir / settings.name, settings)
    if arguments.name is None and not any(each.startswith("name=") for each in arguments.overrides):
        check_run_directory(arguments.config, run)
    fork = getattr(arguments, "fork", None)
    return dated(run, None if fork is None else find(arguments.runs_dir, fork))


def load_config(
    arguments: Namespace,
    *,
    to_start: bool = True,
    starting: Callable[[RunSettings], Collection[str] | None] | None = None,
) -> RunSettings:
    """Return the settings of a configuration, with the overrides of the command line.

    Of a bundle, those of its configuration; the arguments then name that, and the `bundle`.
    `to_start` and `starting` are as in `load` and `load_unfinished`.

    Raises:
        UserError: an input of the bundle is missing or differs.
    """
    arguments.bundle = bundle_at(arguments.config)
    overrides = _overrides(arguments)
    if arguments.bundle is not None:
        arguments.config = arguments.bundle.config
        arguments.bundle.check_inputs(load(arguments.config, overrides, to_start=False))
    if starting is not None:
        return load_unfinished(arguments.config, overrides, starting)
    return load(arguments.config, overrides, to_start=to_start)


def _overrides(arguments: Namespace) -> list[str]:
    name = [] if arguments.name is None else [f"name={json.dumps(arguments.name)}"]
    return [*arguments.overrides, *name, *getattr(arguments, "implied", [])]


def cautions_of(arguments: Namespace, found: Iterable[tuple[str, str]]) -> list[str]:
    """Return each (dotted key, message) about the configuration, with file and line."""
    return located(arguments.config, _overrides(arguments), found)


def graph_cautions(settings: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield blocks and keys that nothing reads, and data and models that may not fit a stage."""
    yield from unread(settings)
    yield from unread_keys(settings)
    yield from pairless(settings)
    yield from template_cautions(settings)
    yield from ancestor_cautions(settings)


def warn_of_graph(arguments: Namespace, settings: RunSettings) -> None:
    """Warn on standard error of `graph_cautions`."""
    warn(cautions_of(arguments, graph_cautions(settings)))


def known_gpus(arguments: Namespace, settings: RunSettings) -> GpusOf:
    """Return the GPUs of `--cluster`'s profile, or without one this machine's."""
    return gpus_of(load_cluster(arguments.cluster)) if arguments.cluster else gpus_here(settings)


def forked(arguments: Namespace, run: Run) -> tuple[RunDirectory | None, RunFork]:
    """Return the run that `--fork` names, and the stages of it that `run` can reuse.

    Raises:
        UserError: other users may have written the run, and it is not trusted.
    """
    if arguments.fork is None:
        return None, RunFork()
    other = find(arguments.runs_dir, arguments.fork)
    check_owner(other, arguments.trust_run)
    return other, find_fork(run, other)


def reuse_from(run: Run, other: RunDirectory) -> None:
    """Reuse the identical stages of another run, and say which."""
    found = find_fork(run, other)
    reuse_stages(run, other, found)
    none = "no stage: none is finished there with identical settings, data and inputs"
    say(f"reused from {shown(other.path)}: {', '.join(found.reused) or none}")
    for name, gate in found.held.items():
        say(f"not reused: {name}, since it waits for {gate}, which has to run first")
    for name, change in found.differing.items():
        say(f"not reused: {name}: {change}")


def rerun(run: Run, names: list[str]) -> None:
    """Put the output of the named stages and everything downstream aside, and say where."""
    for directory in put_aside(run, run.downstream(names) if names else []):
        say(f"put aside {shown(directory)}")
