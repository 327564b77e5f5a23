"""What a run needs around it and may not find: files, modules, variables, CPU cores.

A Python reward's function is found without importing it; without this check a mistyped name would
be noticed only after the cold start.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parallel.families import FAMILIES
from parallel.files import CHARACTERS, WEIGHTS_INDEX, unreachable
from parallel.settings import EngineSettings, ModelSettings
from pipeline.config.violations import hint, shown
from pipeline.errors import BraidError
from stages.data.formats import FORMATS
from stages.data.reasoning_gym_options import options, value_violation
from stages.data.sources.settings import (
    FileSettings,
    ReasoningGymPromptSettings,
    TooManyDirectories,
)
from stages.rewards.kinds.judge import JudgeReward
from stages.rewards.kinds.python import PythonReward
from stages.settings import DomainSettings, RunSettings

Found = Iterator[tuple[str, str]]
MOST_BYTES = 1 << 26  # of a file of JSON, far above the index of any checkpoint


def surroundings(run: RunSettings) -> Found:
    """Yield what the stages need and do not find here, as (dotted key, message).

    A run that has started is read without it: such things may be gone, or not visible from here.
    """
    yield from weights_rules(run.model)
    yield from missing_tokenizer(run.model)
    for name, domain in run.domains.items():
        yield from domain_surroundings(name, domain, demonstrated=run.cold_start is not None)
    if lack := placement_fault(run.engine):
        yield "engine.placement", lack


def domain_surroundings(name: str, domain: DomainSettings, *, demonstrated: bool = True) -> Found:
    """Yield what a domain needs and does not find here, as (dotted key, message)."""
    yield from missing_data(f"domains.{name}", domain, demonstrated)
    yield from option_rules(f"domains.{name}", domain)
    yield from reward_needs(f"domains.{name}.rewards", domain)


def missing_data(key: str, domain: DomainSettings, demonstrated: bool) -> Found:
    """The domain's files that are not there; demonstrations count where a cold start learns from
    them."""
    blocks: dict[str, object] = {"prompts": domain.prompts}
    if demonstrated:
        blocks["demonstrations"] = domain.demonstrations
    for block, settings in blocks.items():
        if not isinstance(settings, FileSettings):
            continue
        if (why := unreachable(settings.path)) is not None:
            yield f"{key}.{block}.path", f"{shown(settings.path)} {why}"
            continue
        try:
            found = settings.files()
        except TooManyDirectories as why_not:
            yield f"{key}.{block}.path", f"{shown(settings.path)} {why_not}"
            continue
        if not found:
            below = (
                f" with a name that ends in .{settings.source}" if settings.path.is_dir() else ""
            )
            yield f"{key}.{block}.path", f"no file at {shown(settings.path)}{below}"


def missing_tokenizer(model: ModelSettings) -> Found:
    """Yield that the directory of `model.tokenizer` is not there."""
    if model.tokenizer == CHARACTERS:
        return
    folder = Path(model.tokenizer)
    if (why := unreachable(folder)) is not None:
        yield "model.tokenizer", f"{shown(folder)} {why}"
    elif not folder.is_dir():
        yield "model.tokenizer", f"no such folder: {shown(folder)}; or use {CHARACTERS}"


def option_rules(key: str, domain: DomainSettings) -> Found:
    """Return wrong options of a reasoning-gym dataset, where reasoning-gym is installed."""
    prompts = domain.prompts
    if not isinstance(prompts, ReasoningGymPromptSettings) or prompts.dataset not in FORMATS:
        return
    if (known := options(prompts.dataset)) is None:
        return
    for name, value in prompts.config.items():
        option = f"{key}.prompts.config.{name}"
        if name not in known:
            yield option, f"unknown option of {prompts.dataset}; {hint(name, known)}"
        elif fault := value_violation(known[name], value):
            yield option, fault


def weights_rules(model: ModelSettings) -> Found:
    """Yield the first error that keeps a run from starting with `model.initial_weights`."""
    if model.initial_weights is not None and (
        fault := _weights_violation(Path(model.initial_weights), model.family)
    ):
        yield "model.initial_weights", fault


def _weights_violation(folder: Path, family: str) -> str | None:
    if (why := unreachable(folder)) is not None:
        return f"{shown(folder)} {why}"
    if not folder.is_dir():
        return f"no such folder: {shown(folder)}"
    return _config_violation(folder / "config.json", family) or _files_violation(folder)


def _config_violation(path: Path, family: str) -> str | None:
    config, fault = _json(path)
    if fault is not None:
        return f"{fault}; name the folder of a Hugging Face checkpoint"
    kind = config.get("model_type")
    if not isinstance(kind, str | None):
        return f"{shown(path)}: model_type: should be the name of a family"
    if kind not in FAMILIES:
        known = hint(str(kind), FAMILIES)
        return f"{shown(path)}: model_type: {json.dumps(kind)} is no family known here; {known}"
    if kind != family:
        return f"{shown(path)}: model_type: {kind}, but model.family is {family}"
    return None


def _files_violation(folder: Path) -> str | None:
    path = folder / WEIGHTS_INDEX
    if not path.exists() and not path.is_symlink():
        if found := sorted(folder.glob("*.safetensors")):
            return next(filter(None, map(_not_a_file, found)), None)
        return (
            f"{shown(folder)} has neither a *.safetensors file nor {WEIGHTS_INDEX}; of other "
            "formats transformers makes them with save_pretrained"
        )
    index, fault = _json(path)
    if fault is not None:
        return fault
    files = index.get("weight_map")
    named = files.values() if isinstance(files, dict) else ()
    if not named or not all(isinstance(name, str) for name in named):
        return f"{shown(path)}: weight_map: should name the file of every tensor"
    absent = sorted(name for name in set(named) if not (folder / name).is_file())
    if not absent:
        return None
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"{shown(path)}: weight_map: names {absent[0]}{more}, and no such file is there"


def _json(path: Path) -> tuple[dict[str, Any], str | None]:
    """A mapping from a file of JSON, or what is wrong with it."""
    try:
        if not path.exists() and not path.is_symlink():
            return {}, f"{shown(path.parent)} has no {path.name}"
        if (fault := _not_a_file(path)) is not None:
            return {}, fault
        if path.stat().st_size > MOST_BYTES:
            return {}, f"{shown(path)}: has more than {MOST_BYTES >> 20} MiB"
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {}, f"{shown(path)}: cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return {}, f"{shown(path)}: is not valid JSON: {error}"
    return (found, None) if isinstance(found, dict) else ({}, f"{shown(path)}: is no JSON object")


def _not_a_file(path: Path) -> str | None:
    """What a name that is there stands for instead of a file, such as a pipe, which would never
    end, or what a download that was broken off leaves in a cache."""
    if path.is_file():
        return None
    if path.is_symlink() and not path.exists():
        return f"{shown(path)}: is a link to a file that is not there; download it once more"
    return f"{shown(path)}: is no file"


def reward_needs(key: str, domain: DomainSettings) -> Found:
    """What a domain's rewards need around them and do not find, as (dotted key, message)."""
    for name, reward in domain.rewards.items():
        if isinstance(reward, PythonReward) and (fault := function_fault(reward.function)):
            yield f"{key}.{name}.function", fault
        if isinstance(reward, JudgeReward):
            file, variable = reward.api_key_file, reward.api_key_variable
            if file is not None and (why := unreachable(file)) is not None:
                yield f"{key}.{name}.api_key_file", f"{shown(file)} {why}"
            elif file is not None and not file.is_file():
                yield f"{key}.{name}.api_key_file", f"no such file: {shown(file)}"
            if variable is not None and variable not in os.environ:
                yield (
                    f"{key}.{name}.api_key_variable",
                    f"the environment has no variable {variable}",
                )


def function_fault(reference: str) -> str | None:
    """What is wrong with `package.module:function`, or None.

    A module is looked for where a stage's process would: in the working directory, then where
    Python's packages lie.
    """
    module, _, function = reference.partition(":")
    spec = _find(module)
    if spec is None:
        return _not_found(module, function)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    where = shown(Path(spec.origin))
    try:
        names = _TopLevel(ast.parse(Path(spec.origin).read_bytes())).names
    except SyntaxError as error:
        return f"{where}:{error.lineno} is not valid Python: {error.msg}"
    except OSError as error:
        return f"{where} cannot be read: {error.strerror}"
    # Of expressions nested too deeply; the parser's MemoryError says no more than that either.
    except (MemoryError, RecursionError, ValueError) as error:
        return f"{where} cannot be read: {str(error) or 'it is too deeply nested for Python'}"
    known = function in names or "*" in names
    return None if known else f"{where} defines no {function}"


def _not_found(module: str, function: str) -> str:
    """Return why there is no such module: its package is a plain module, or it is nowhere."""
    package = module.rpartition(".")[0]
    spec = _find(package) if package else None
    if spec is not None and spec.submodule_search_locations is None:
        return (
            f"{package} is a module and no package: name the module whose file defines {function},"
            f" not {module}"
        )
    return f"no module {module} in the working directory or among Python's packages"


def _find(module: str) -> ModuleSpec | None:
    """The module's specification. `find_spec` alone would import the packages around it."""
    top, *parts = module.split(".")
    try:
        spec = PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top)
    except ValueError:  # a name that no module can have
        return None
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name alone: a package without an __init__.py would else look for the one
        # around it among the imported ones.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


class _TopLevel(ast.NodeVisitor):
    """Every name that a module binds outside its functions and classes, below `try` and `if` too.

    `*` stands for whatever a star import brings.
    """

    def __init__(self, module: ast.Module) -> None:
        self.names: set[str] = set()
        self.visit(module)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names.add(node.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)

    def visit_alias(self, node: ast.alias) -> None:
        self.names.add(node.asname or node.name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names.add(node.id)


@dataclass(frozen=True)
class Cores:
    """The cores of all ranks together and those of each engine; None means any."""

    ranks: list[int] | None
    engines: list[list[int] | None]


def share_out(engine: EngineSettings, cores: Sequence[int] | None = None) -> Cores:
    """The `cores`, by default all that this process may use, as `engine.placement` wants them.

    Each rank of an engine of its `own` gets one of the last cores, and the trainer's ranks the
    rest. Engines that share the cores with the trainer keep out of one another's way: each gets
    its part of them all, where there are enough.

    Raises:
        BraidError: no core would be left for the ranks.
    """
    cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
    if engine.placement == "shared":
        part = len(cores) // engine.count
        if engine.count == 1 or part < engine.tensor:
            return Cores(None, [None] * engine.count)
        starts = range(0, engine.count * part, part)
        return Cores(None, [cores[start : start + part] for start in starts])
    if fault := placement_fault(engine, cores):
        raise BraidError(f"engine.placement: {fault}")
    first = len(cores) - engine.count * engine.tensor
    starts = range(first, len(cores), engine.tensor)
    return Cores(cores[:first], [cores[start : start + engine.tensor] for start in starts])


def placement_fault(engine: EngineSettings, cores: Sequence[int] | None = None) -> str | None:
    """Why the engines cannot be placed on the `cores`, by default all that this process may use."""
    found = len(os.sched_getaffinity(0) if cores is None else cores)
    needed = engine.count * engine.tensor + 1
    if engine.placement == "shared" or needed <= found:
        return None
    return (
        f"own needs {needed} cores, one for each of {engine.count} x {engine.tensor} engine ranks "
        f"and at least one for the trainer's, and here are {found}; use fewer, or shared"
    )
