"""The datasets of reasoning-gym and their options, from the package's source.

Importing reasoning_gym takes a second and numpy. Its files are parsed instead, in milliseconds: a
login node validates a configuration at once. Of a dataset's module only the config class runs, with
the definitions that it refers to. Never imports torch.
"""

from __future__ import annotations

import ast
import builtins
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
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from parallel.errors import hint

PACKAGE = "reasoning_gym"
SET_BY_THE_STREAM = {"seed", "size"}
# The largest integer option (numbers, digits or letters of a problem) of a compact text: the
# highest level of reasoning-gym's own curricula. A million would take seconds for every problem.
MOST = 1000
TYPES: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}
REGISTERED = re.compile(r"^register_dataset\(\s*(\w+|\"[^\"]+\"),\s*(\w+),\s*(\w+)", re.MULTILINE)
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
class RegisteredDataset:
    """A dataset of the installed reasoning-gym: its module's file, and its classes by name."""

    path: Path
    dataset_class: str
    config_class: str


@cache
def registered() -> dict[str, RegisteredDataset]:
    """Return the datasets of reasoning-gym by name; none where it is not installed."""
    spec = find_spec(PACKAGE)
    found = {}
    for root in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            for name, dataset, config in REGISTERED.findall(text):
                if not name.startswith('"'):
                    stated = re.search(rf"^{name}\s*=\s*\"([^\"]+)\"", text, re.MULTILINE)
                    name = stated[0].partition("=")[2].strip() if stated else name
                found[name.strip('"')] = RegisteredDataset(path, dataset, config)
    return found


def dataset_violation(dataset: str) -> str | None:
    """Return why a domain cannot have this dataset on this machine, or None."""
    if not (known := registered()):  # reasoning-gym is not installed
        return None
    if dataset not in known:
        return f"no such dataset: {dataset}; {hint(dataset, known)}"
    if dataset in REFUSED:
        return f"{dataset} cannot be trained on: {REFUSED[dataset]}"
    if dataset in HASHED and not os.environ.get(HASH_SEED, "").isdigit():
        return (
            f"{dataset} draws its problems in the order of Python's sets, which differs between"
            f" processes; set the environment variable {HASH_SEED}=0 for the run"
        )
    return None


@cache
def options(dataset: str) -> dict[str, str] | None:
    """Return the type of every option of a dataset, by name.

    None: reasoning-gym is not installed, or in a version that this does not read.
    """
    if (found := _config_class(dataset)) is None:
        return None
    stated = [each for each in found.body if isinstance(each, ast.AnnAssign)]
    types = {ast.unparse(each.target): ast.unparse(each.annotation) for each in stated}
    return {name: of for name, of in types.items() if name not in SET_BY_THE_STREAM}


def option_violations(
    dataset: str, config: Mapping[str, Any], *, compact: bool
) -> Iterator[tuple[str, str]]:
    """Yield each wrong option as (key below `prompts`, message).

    The last is what the config class itself says of values of the right types.
    """
    if (known := options(dataset)) is None:
        return
    wrong = False
    for option, value in config.items():
        if option not in known:
            message: str | None = f"unknown option of {dataset}; {hint(option, known)}"
        else:
            message = value_violation(known[option], value, MOST if compact else None)
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
        made = config_class(**config)
        if hasattr(made, "validate"):
            made.validate()
    except NameError:  # of a module that is not loaded
        return None
    except Exception as error:  # the classes reject values by assertions and other errors
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return str(error) or f"{frame.line} is false"
    return None


def _config_class(dataset: str) -> ast.ClassDef | None:
    """Return the definition of a dataset's config class; None where there is none to read."""
    if (found := registered().get(dataset)) is None:
        return None
    try:
        tree = ast.parse(found.path.read_bytes())
    except (OSError, SyntaxError):
        return None
    classes = (each for each in tree.body if isinstance(each, ast.ClassDef))
    return next((each for each in classes if each.name == found.config_class), None)


@cache
def _loaded(dataset: str) -> type[Any] | None:
    """Return the config class, run with the definitions of its module that it refers to alone."""
    if (found := registered().get(dataset)) is None:
        return None
    try:
        tree = ast.parse(found.path.read_bytes())
        body = _needed(tree, found.config_class)
        module = ModuleType(f"{PACKAGE}_options.{dataset}")
        sys.modules[module.__name__] = module  # where dataclasses look up annotations
        module.__dict__["StrEnum"] = enum.StrEnum  # the package has a copy for older Pythons
        code = compile(ast.Module(body, []), str(found.path), "exec")
        exec(code, module.__dict__)
        loaded: type[Any] = module.__dict__[found.config_class]
    except Exception:  # a definition needs what is not loaded; the stage reports its own errors
        return None
    return loaded if dataclasses.is_dataclass(loaded) else None


def _needed(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the statements of a module that define `name`, and all that these refer to.

    Of imports only the standard library's: others would load the package.
    """
    wanted, kept = [name], dict.fromkeys(each for each in tree.body if _is_future(each))
    seen = set(dir(builtins))
    while wanted:
        if (name := wanted.pop()) in seen:
            continue
        seen.add(name)
        for statement in tree.body:
            if name in _bound(statement):
                kept[statement] = None
                names = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
                wanted += [each.id for each in names]
    return [each for each in tree.body if each in kept]


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        module = statement.names[0].name
        if isinstance(statement, ast.ImportFrom):
            module = "" if statement.level else statement.module or ""
        if module.partition(".")[0] not in sys.stdlib_module_names:
            return set()
        return {each.asname or each.name.partition(".")[0] for each in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {each.id for each in targets if isinstance(each, ast.Name)}
    return set()


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
