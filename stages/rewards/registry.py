"""From settings to the functions that score. Each kind's file, and the library behind it, is
imported only where the kind is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from stages.data.problem import DomainError
from stages.rewards import sandbox
from stages.rewards.reward import Reward
from stages.rewards.settings import RewardSettings

# Of each kind, the function (settings, directory) -> reward; what it keeps lies in the directory.
MAKERS = {
    "reasoning_gym": "stages.rewards.reasoning_gym:make",
    "math": "stages.rewards.math:make",
    "instruction": "stages.rewards.instruction:make",
    "json_schema": "stages.rewards.json_schema:make",
    "judge": "stages.rewards.judge:make",
    "code": "stages.rewards.code:make",
    "python": "stages.rewards.python:make",
    "overlong": "stages.rewards.length:make_overlong",
    "length": "stages.rewards.length:make_length",
    "format": "stages.rewards.format:make_format",
    "language": "stages.rewards.format:make_language",
}


def make(domain: str, name: str, settings: RewardSettings, directory: Path) -> Reward:
    """The reward called `name` of a domain. Raises DomainError where it cannot be had."""
    module, _, function = MAKERS[settings.kind].partition(":")
    try:
        reward: Reward = getattr(import_module(module), function)(settings, directory)
    except Exception as error:  # whatever a library or a module of one's own raises
        raise DomainError(domain, f"rewards.{name}", str(error) or repr(error)) from error
    return reward


def check_machine(rewards: Mapping[str, Mapping[str, RewardSettings]]) -> None:
    """Raise DomainError where a reward of these domains can never be had on this machine, before
    anything is drawn for it."""
    for domain, own in rewards.items():
        for name, settings in own.items():
            if settings.kind == "code":
                try:
                    sandbox.check()
                except sandbox.SandboxError as error:
                    message = f"{error}; docs/explanation/sandbox.md says what the host must allow"
                    raise DomainError(domain, f"rewards.{name}", message) from error


def modules(rewards: Iterable[RewardSettings]) -> list[str]:
    """The modules that make these rewards; none of them imports a module of one's own."""
    return sorted({MAKERS[each.kind].partition(":")[0] for each in rewards})
