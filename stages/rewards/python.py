"""A reward of one's own: any importable function(problem, response text) -> float or Steps."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from pathlib import Path

from stages.rewards.reward import Reward, RewardError
from stages.rewards.settings import PythonReward


def make(settings: PythonReward, _directory: Path) -> Reward:
    """The function that the settings name. Raises RewardError where there is none.

    It is given a problem of its own: a group's responses share theirs, and what one function writes
    into it no other reward should read.
    """
    module_name, _, function_name = settings.function.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever it raises while it is imported
        raise RewardError(f"cannot import {module_name}: {error!r}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"{module_name} has no function {function_name!r}")
    return lambda problem, response: function(deepcopy(problem), response.text)
