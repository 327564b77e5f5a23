"""The user's own reward: any importable function(problem, response text) -> float or Steps."""

from __future__ import annotations

import sys
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

from pydantic import Field

from stages.rewards.reward import Reward, RewardBase, RewardError, register


class PythonReward(RewardBase):
    """Your own function: (problem, response text) -> float or `Steps`, or (either, text)."""

    kind: Literal["python"] = "python"
    function: str = Field(pattern=r"^[\w.]+:\w+$", description="package.module:function")
    path: Path | None = Field(
        default=None,
        description="directory that the module is imported from; null: the working directory, or"
        " else sys.path",
    )


@register(PythonReward)
def make(settings: PythonReward, _directory: Path) -> Reward:
    """Return the function, on a copy of the problem. Raises RewardError where there is none."""
    module_name, _, function_name = settings.function.partition(":")
    if settings.path is not None and str(settings.path) not in sys.path:
        sys.path.insert(0, str(settings.path))
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        raise RewardError(f"cannot import {module_name}: {error!r}") from error
    if settings.path is not None:
        _check_origin(module, settings.path)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"{module_name} has no function {function_name!r}")
    # A copy: a group's responses share their problem, and no reward should read what another wrote.
    return lambda problem, response: function(deepcopy(problem), response.text)


def _check_origin(module: ModuleType, directory: Path) -> None:
    """Raise RewardError where a module of the name was imported from elsewhere before."""
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).resolve().is_relative_to(directory.resolve()):
        raise RewardError(
            f"{module.__name__} is imported from {file}, not from path = {directory}; give one of "
            "the two modules another name"
        )
