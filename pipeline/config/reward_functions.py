"""Rules of a domain's rewards, and what they need around them: functions, files, variables.

A function is found without importing it: a mistyped one would otherwise be noticed only when the
cold start is done.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from parallel.files import unreachable
from pipeline.config.violations import shown
from stages.rewards.kinds.judge import JudgeReward
from stages.rewards.kinds.python import PythonReward
from stages.rewards.settings import RewardPoolSettings
from stages.settings import DomainSettings

Found = Iterator[tuple[str, str]]


def reward_rules(key: str, domain: DomainSettings, pool: RewardPoolSettings | None) -> Found:
    """Every broken rule of a domain's rewards, which stand at `key`, as (dotted key, message)."""
    if not any(reward.weight for reward in domain.rewards.values()):
        yield key, "every weight is 0, so that no response is better than another"
    for name, reward in domain.rewards.items():
        own = f"{key}.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield (
                own,
                "a reward's name is made of letters, digits, _ and -, since it names a metric",
            )
        longest = domain.sampling.max_response_tokens
        yield from reward.rules(own, domain.prompts.source, longest, pool)


def step_rules(key: str, domain: DomainSettings, objective: str) -> Found:
    """What the advantage `process` of an objective asks of the rewards at `key`."""
    own = [reward for reward in domain.rewards.values() if isinstance(reward, PythonReward)]
    if not own:
        yield key, f"{objective}.advantage process compares steps, which only kind: python judges"
    elif all(each.unfinished == "zero" or each.timed_out is not None for each in own):
        yield (
            key,
            f"{objective}.advantage process compares steps, and a response that was cut off or took"
            " too long to judge has none: give the reward that judges them unfinished: score and"
            " timed_out: null",
        )


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
