"""Options of reasoning-gym's datasets, as the source of their config classes states them.

Importing reasoning-gym takes seconds and numpy; parsing one of its modules takes milliseconds, so
that a login node validates a configuration at once. Never imports torch.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stages.data.formats import FORMATS

PACKAGE = "reasoning_gym"
SET_BY_THE_STREAM = {"seed", "size"}
# The largest integer option (numbers, digits or letters of a problem): the highest level of
# reasoning-gym's own curricula. A million would take seconds for every problem.
MOST = 1000
TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
}


@cache
def options(dataset: str) -> dict[str, str] | None:
    """Return the type of every option of a dataset of FORMATS, by name.

    None: reasoning-gym is not installed, or in a version that this does not read.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    module = FORMATS[dataset].module.replace(".", "/")
    path = Path(spec.submodule_search_locations[0]) / f"{module}.py"
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            stated = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            types = {ast.unparse(each.target): ast.unparse(each.annotation) for each in stated}
            return {name: of for name, of in types.items() if name not in SET_BY_THE_STREAM}
    return None


def value_violation(kind: str, value: Any) -> str | None:
    """Return what is wrong with an option's value, or None; `kind` is the option's type."""
    expected = TYPES.get(kind)
    if expected is None:
        return None
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
        return f"should be {kind}, not {json.dumps(value, default=str)}"
    if kind == "int" and isinstance(value, int) and not -MOST <= value <= MOST:
        return f"should be between -{MOST} and {MOST}, not {value}"
    return None
