"""The datasets of the installed reasoning-gym, for `stages/data/reasoning_gym_datasets.json`.

    python -m tools.reasoning_gym_datasets

`make lock` runs it after an upgrade, and a test compares the file with the installed package.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.data.reasoning_gym_options import DISTRIBUTION, FILE, SET_BY_THE_STREAM, installed


def dataset_classes() -> dict[str, tuple[type[Any], type[Any]]]:
    """Return the dataset class and the config class of every dataset, by its name.

    They are sorted by their modules' paths.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib compares with `is`
        from reasoning_gym.factory import DATASETS
    return dict(sorted(DATASETS.items(), key=lambda dataset: source_of(dataset[1][1])))


def source_of(class_: type[Any]) -> Path:
    """Return the file of the module that defines a class."""
    return Path(inspect.getfile(class_))


def described() -> dict[str, Any]:
    """Return the content of the file: the version, and each dataset's config class and options."""
    package, datasets = installed(), {}
    assert package is not None
    for name, (_, config_class) in dataset_classes().items():
        path = source_of(config_class)
        tree = ast.parse(path.read_bytes())
        datasets[name] = {
            "module": path.relative_to(package).as_posix(),
            "config_class": config_class.__name__,
            "options": _options(tree, config_class.__name__),
            "lines": [statement.lineno for statement in _needed(tree, config_class.__name__)],
        }
    return {"version": version(DISTRIBUTION), "datasets": datasets}


def text_of(content: dict[str, Any]) -> str:
    """Return the file's text, a dataset a line."""
    lines = [f'    "{name}": {json.dumps(of)}' for name, of in content["datasets"].items()]
    head = f'{{\n  "version": {json.dumps(content["version"])},\n  "datasets": {{\n'
    return head + ",\n".join(lines) + "\n  }\n}\n"


def _options(tree: ast.Module, config_class: str) -> dict[str, str]:
    """Return the types of a config class's fields, as they are written, by name."""
    [body] = [
        statement.body
        for statement in tree.body
        if isinstance(statement, ast.ClassDef) and statement.name == config_class
    ]
    fields = [statement for statement in body if isinstance(statement, ast.AnnAssign)]
    types = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    return {name: type_ for name, type_ in types.items() if name not in SET_BY_THE_STREAM}


def _needed(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the statements of a module that define `name`, and all that these refer to.

    Of imports only the standard library's: others would load the package.
    """
    names, needed = [name], {statement for statement in tree.body if _is_future(statement)}
    seen = set(dir(builtins))
    while names:
        if (name := names.pop()) in seen:
            continue
        seen.add(name)
        for statement in tree.body:
            if name in _bound(statement):
                needed.add(statement)
                names += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return [statement for statement in tree.body if statement in needed]


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
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


if __name__ == "__main__":
    FILE.write_text(text_of(described()))
