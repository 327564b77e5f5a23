"""From settings to the functions that score. Each kind's file, and the library behind it, is
imported only where the kind is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from stages.domains import sandbox
from stages.domains.problem import DomainError
from stages.domains.rewards.reward import Reward
from stages.domains.rewards.settings import RewardSettings

# Of each kind, the function (settings, directory) -> reward; what it keeps lies in the directory.
MAKERS = {
    "reasoning_gym": "stages.domains.rewards.reasoning_gym:make",
    "math": "stages.domains.rewards.mathematics:make",
    "instruction": "stages.domains.rewards.instruction:make",
    "json_schema": "stages.domains.rewards.schema:make",
    "judge": "stages.domains.rewards.judge:make",
    "code": "stages.domains.rewards.code:make",
    "python": "stages.domains.rewards.own:make",
    "overlong": "stages.domains.rewards.length:make_overlong",
    "length": "stages.domains.rewards.length:make_length",
    "format": "stages.domains.rewards.text:make_format",
    "language": "stages.domains.rewards.text:make_language",
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
                    message = f"{error}; docs/sandbox.md says what the host must allow"
                    raise DomainError(domain, f"rewards.{name}", message) from error


def modules(rewards: Iterable[RewardSettings]) -> list[str]:
    """The modules that make these rewards; none of them imports a module of one's own."""
    return sorted({MAKERS[each.kind].partition(":")[0] for each in rewards})
