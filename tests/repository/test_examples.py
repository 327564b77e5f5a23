"""The examples of docstrings: each runs, and shows what it says."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest
from tools.structure import FLOORS, REPOSITORY

SHOWN = [
    path.relative_to(REPOSITORY)
    for directory in (*FLOORS, "tools")
    for path in sorted((REPOSITORY / directory).rglob("*.py"))
    if ">>> " in path.read_text()
]
FEWEST = 60  # modules with an example that runs; a change may only raise it


@pytest.mark.parametrize("path", SHOWN, ids=str)
def test_an_example_shows_what_happens(path: Path) -> None:
    module = import_module(".".join(path.with_suffix("").parts))
    failed, attempted = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert attempted and not failed, "python -m doctest prints what differs"


def test_examples_are_kept() -> None:
    assert len(SHOWN) >= FEWEST
