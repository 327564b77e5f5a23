"""The arguments that several commands take, their types, and what `--json` prints."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any

from pipeline.commands.support.registry import Argument
from pipeline.run.directory import TRUST_OPTION

LARGEST = 10**18 - 1  # fits a file's name, and 64 bits


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


RUN = Argument("run", metavar="RUN", help="the run's name or directory")
STAGE = Argument("stage", metavar="STAGE", help="the stage's name, as `braid status` shows it")
JSON = Argument("--json", action="store_true", help="print JSON on standard output, and only that")
CLUSTER = Argument(
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
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(element) for element in value]
    return value
