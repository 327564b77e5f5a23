"""The datasets of reasoning-gym and their options, without importing it.

The import takes a second and numpy. `reasoning_gym_datasets.json` holds what the pinned version
says of its datasets (`python -m tools.reasoning_gym_datasets`): a login node validates a
configuration at once. Of a dataset's module only the config class runs, with the definitions that
it refers to. Never imports torch.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from parallel.errors import hint
from stages.data.compact_forms import FORMATS
from stages.data.settings import ReasoningGymPromptSettings

PACKAGE, DISTRIBUTION = "reasoning_gym", "reasoning-gym"
FILE = Path(__file__).with_name("reasoning_gym_datasets.json")
SET_BY_THE_STREAM = {"seed", "size"}
# The largest integer option (numbers, digits or letters of a problem) of a compact text: the
# highest level of reasoning-gym's own curricula. A million would take seconds for every problem.
MOST = 1000
TYPES: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}
# Datasets that no domain can be made of, with the reason.
REFUSED = {
    "composite": "it has no problems of its own; make a domain of each of its datasets",
    "codeio": "two draws of one problem differ, so that no stage could be resumed",
}
# Their problems depend on the order of sets of strings, which every process of Python shuffles.
HASHED = {
    *("isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication"),
    *("ransom_note", "word_ladder"),
}
HASH_SEED = "PYTHONHASHSEED"


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of the pinned reasoning-gym: its module, its config class and that class's options.

    `lines` are the first ones of the module's statements that define the class, and of all that
    these refer to. `options` has their types as the class writes them.

    Example: `chain_sum` has module "arithmetic/chain_sum.py", config_class "ChainSumConfig" and
    options {"min_terms": "int", "max_terms": "int", ..., "allow_negation": "bool"}.
    """

    module: str
    config_class: str
    options: dict[str, str]
    lines: list[int]


@cache
def pinned() -> tuple[str, dict[str, DatasetSource]]:
    """Return the version of reasoning-gym that FILE describes, and its datasets by name."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    datasets = {name: DatasetSource(**source) for name, source in content["datasets"].items()}
    return content["version"], datasets


@cache
def installed() -> Path | None:
    """Return the directory of the installed package, or None where it is not installed."""
    spec = find_spec(PACKAGE)
    locations = spec and spec.submodule_search_locations
    return Path(locations[0]) if locations else None


@cache
def version_violation() -> str | None:
    """Return why the installed reasoning-gym cannot be used, or None.

    Another version may have other options, and scorers that run a response's text as code.
    """
    if installed() is None:
        return None
    checked = pinned()[0]
    try:
        present = version(DISTRIBUTION)
    except PackageNotFoundError:
        present = "of an unknown version"
    if present == checked:
        return None
    return (
        f"the options and scorers of reasoning-gym {checked} are known, and {present} is installed;"
        f" install {DISTRIBUTION}=={checked}"
    )


def prompt_violations(settings: ReasoningGymPromptSettings) -> Iterator[tuple[str, str]]:
    """Yield each (key below `prompts`, message) that is wrong with a domain's dataset."""
    name, compact = settings.dataset, settings.form == "compact"
    if wrong := dataset_violation(name):
        yield "dataset", wrong
    elif compact and name not in FORMATS:
        names = ", ".join(sorted(FORMATS))
        yield "dataset", f"{name} has no compact text; use prompts.form: chat, or one of {names}"
    else:
        yield from option_violations(name, settings.config, compact=compact)


def dataset_violation(dataset: str) -> str | None:
    """Return why a domain cannot have this dataset on this machine, or None."""
    if installed() is None:  # as on a login node: the stage checks it
        return None
    if wrong := version_violation():
        return wrong
    if dataset not in (datasets := pinned()[1]):
        return f"no such dataset: {dataset}; {hint(dataset, datasets)}"
    if dataset in REFUSED:
        return f"{dataset} cannot be trained on: {REFUSED[dataset]}"
    if dataset in HASHED and not os.environ.get(HASH_SEED, "").isdigit():
        return (
            f"{dataset} draws its problems in the order of Python's sets, which differs between"
            f" processes; set the environment variable {HASH_SEED}=0 for the run"
        )
    return None


def options(dataset: str) -> dict[str, str] | None:
    """Return the type of every option of a dataset, by name; None without reasoning-gym."""
    source = pinned()[1].get(dataset)
    return None if source is None or installed() is None else source.options


def option_violations(
    dataset: str, config: Mapping[str, Any], *, compact: bool
) -> Iterator[tuple[str, str]]:
    """Yield each wrong option as (key below `prompts`, message).

    The last is what the config class itself says of values of the right types.
    """
    if (types := options(dataset)) is None:
        return
    wrong = False
    for option, value in config.items():
        if option not in types:
            message: str | None = f"unknown option of {dataset}; {hint(option, types)}"
        else:
            message = value_violation(types[option], value, MOST if compact else None)
        if message:
            wrong = True
            yield f"config.{option}", message
    if not wrong and (message := config_violation(dataset, config)):
        yield "config", f"{dataset}: {message}"


def value_violation(kind: str, value: Any, most: int | None = MOST) -> str | None:
    """Return what is wrong with an option's value, or None; `kind` is the option's type."""
    optional = re.fullmatch(r"Optional\[(\w+)\]", kind)
    if optional is not None and value is None:
        return None
    if (expected := TYPES.get(optional[1] if optional else kind)) is None:
        return None
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        return f"should be {kind}, not {json.dumps(value, default=str)}"
    if most is not None and expected is int and not -most <= value <= most:
        return f"should be between -{most} and {most}, not {value}"
    return None


def config_violation(dataset: str, config: Mapping[str, Any]) -> str | None:
    """Return what the dataset's own config class says of these options, or None.

    None too where the class cannot be run without the rest of the package.
    """
    if (config_class := _loaded(dataset)) is None:
        return None
    try:
        settings = config_class(**config)
        if hasattr(settings, "validate"):
            settings.validate()
    except NameError:  # of a module that is not loaded
        return None
    except Exception as error:  # the classes reject values by assertions and other errors
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return str(error) or f"{frame.line} is false"
    return None


@cache
def _loaded(dataset: str) -> type[Any] | None:
    """Return the config class, run with the definitions of its module that it refers to alone."""
    package, source = installed(), pinned()[1].get(dataset)
    if package is None or source is None or version_violation():
        return None
    path = package / source.module
    try:
        tree = ast.parse(path.read_bytes())
        # Statements keep their lines, which messages quote.
        tree.body = [statement for statement in tree.body if statement.lineno in source.lines]
        module = ModuleType(f"{PACKAGE}_options.{dataset}")
        sys.modules[module.__name__] = module  # where dataclasses look up annotations
        module.__dict__["StrEnum"] = enum.StrEnum  # the package has a copy for older Pythons
        exec(compile(tree, str(path), "exec"), module.__dict__)
        loaded: type[Any] = module.__dict__[source.config_class]
    except Exception:  # a definition needs what is not loaded; the stage reports its own errors
        return None
    return loaded if dataclasses.is_dataclass(loaded) else None
