"""Every test of the objectives checks the shapes of what their functions take and return."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stages.objectives.loss import REGISTRIES
from tests.stages.objectives.shapes import checked, functions

CHECKED = {function: checked(function) for _, _, function in functions()}
MODULES = list(dict.fromkeys(module for module, _, _ in functions()))


@pytest.fixture(autouse=True)
def shapes_are_checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put checked functions where the product's modules, the registries and a test look them up."""
    for module in (*MODULES, request.module):
        for name, value in list(vars(module).items()):
            if isinstance(value, type(checked)) and value in CHECKED:
                monkeypatch.setattr(module, name, CHECKED[value])
    for registry in REGISTRIES:
        for name, algorithm in list(registry.items()):
            if algorithm.function in CHECKED:
                function = CHECKED[algorithm.function]
                monkeypatch.setitem(registry, name, replace(algorithm, function=function))
