"""The user's own reward: any importable function(problem, response text) -> float or Steps."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.rewards.reward import Reward, RewardBase, RewardError, register


class PythonReward(RewardBase):
    """Your own function: (problem, response text) -> float or `Steps`."""

    kind: Literal["python"] = "python"
    function: str = Field(pattern=r"^[\w.]+:\w+$", description="package.module:function")


@register(PythonReward)
def make(settings: PythonReward, _directory: Path) -> Reward:
    """Return the function, on a copy of the problem. Raises RewardError where there is none."""
    module_name, _, function_name = settings.function.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        raise RewardError(f"cannot import {module_name}: {error!r}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"{module_name} has no function {function_name!r}")
    # A copy: a group's responses share their problem, and no reward should read what another wrote.
    return lambda problem, response: function(deepcopy(problem), response.text)
