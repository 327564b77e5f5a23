"""Finds the function that a domain's `reward` names, without importing it.

A mistyped reward would otherwise be noticed only when the cold start is done.
"""

from __future__ import annotations

import ast
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from pipeline.violations import shown


def reward_fault(reference: str) -> str | None:
    """What is wrong with `package.module:function`, or None.

    A module is looked for where a stage's process would: in the working directory, then where
    Python's packages lie.
    """
    module, _, function = reference.partition(":")
    spec = _find(module)
    if spec is None:
        return f"no module {module} in the working directory or among Python's packages"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        names = _TopLevel(ast.parse(Path(spec.origin).read_bytes())).names
    except SyntaxError as error:
        return f"{shown(Path(spec.origin))}:{error.lineno} is not valid Python: {error.msg}"
    known = function in names or "*" in names
    return None if known else f"{shown(Path(spec.origin))} defines no {function}"


def _find(module: str) -> ModuleSpec | None:
    """The module's specification. `find_spec` alone would import the packages around it."""
    top, *parts = module.split(".")
    try:
        spec = PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top)
    except ValueError:  # a name that no module can have
        return None
    name = top
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
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
