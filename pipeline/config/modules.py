"""The Python modules of rewards, and the files that they are made of; nothing is imported."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

OURS = ("parallel", "pipeline", "stages")  # their revision is in every lineage


@dataclass(frozen=True)
class ModuleFiles:
    """The files of a module, below the directory `root` that it is imported from.

    They are the module's, its packages' `__init__.py`, and all below `root` that these import by a
    statement. Of an `installed` module it is the module's file alone.
    """

    root: Path
    files: tuple[Path, ...]
    installed: bool


def find_module(module: str, directory: Path | None = None) -> ModuleSpec | None:
    """Return a module's specification; `find_spec` alone would import its parent packages.

    It is looked up in `directory`, or as a stage's process would: in the working directory, then on
    `sys.path`.
    """
    top, *submodules = module.split(".")
    try:
        if directory is not None:
            spec = PathFinder.find_spec(top, [str(directory)])
        else:
            spec = PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top)
    except ValueError:  # not a valid module name
        return None
    for submodule in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By the last name alone: with the full name, a namespace package (no __init__.py) looks up
        # its parent in sys.modules, where it is not.
        spec = PathFinder.find_spec(submodule, list(spec.submodule_search_locations))
    return spec


def module_files(module: str, directory: Path | None = None) -> ModuleFiles | None:
    """Return the files of a module; None where it is not found, or not written in Python."""
    if (origin := _source(module, directory)) is None:
        return None
    above = module.count(".") + (origin.name == "__init__.py")
    root = origin.parents[above]
    if root.resolve() in _installed():
        return ModuleFiles(root, (origin,), True)
    files: dict[Path, None] = {}
    seen: set[str] = set()
    left = [module]
    while left:
        for name in _with_packages(left.pop()):
            if name in seen or name.partition(".")[0] in OURS:
                continue
            seen.add(name)
            if (path := _source(name, root)) is not None and path not in files:
                files[path] = None
                left += _imports(path, name)
    return ModuleFiles(root, tuple(sorted(files)), False)


def _source(module: str, directory: Path | None) -> Path | None:
    """Return the file of a module that is written in Python."""
    spec = find_module(module, directory)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _with_packages(module: str) -> Iterator[str]:
    """Return the packages that a module is in, and itself."""
    return accumulate(module.split("."), lambda package, name: f"{package}.{name}")


def _installed() -> set[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return {Path(sysconfig.get_path(name)).resolve() for name in names}


def _imports(path: Path, module: str) -> tuple[str, ...]:
    """Return the names that a file's import statements may load as modules."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    try:
        status = path.stat()
        return _parsed(path, package, status.st_size, status.st_mtime_ns)
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return ()  # `function_violation` reports what Python cannot read


@lru_cache(maxsize=4096)
def _parsed(path: Path, package: str, size: int, changed: int) -> tuple[str, ...]:
    """Return the imports of a file; `size` and the time it `changed` key the cache."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.append(base)
            names += (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
    return tuple(name for name in names if all(name.split(".")))
