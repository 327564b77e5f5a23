"""The kinds of rewards: each module of `stages.rewards.kinds` registers its own. Imports no torch.

A file there is all that a new kind needs: its settings join `RewardSettings`, the schema, `--help`
and the generated reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from stages.data.problem import DomainError
from stages.rewards import kinds
from stages.rewards.reward import REGISTERED, Reward, RewardBase, RewardError

for _module in iter_modules(kinds.__path__):
    import_module(f"{kinds.__name__}.{_module.name}")
KINDS = dict(sorted(REGISTERED.items()))  # whichever was imported first

if TYPE_CHECKING:
    RewardSettings = RewardBase
else:
    RewardSettings = Annotated[
        reduce(or_, (each.settings for each in KINDS.values())), Field(discriminator="kind")
    ]


def make(domain: str, name: str, settings: RewardSettings, directory: Path) -> Reward:
    """Return the reward called `name` of a domain. Raises DomainError where it cannot be made."""
    try:
        return KINDS[settings.kind].make(settings, directory)
    except Exception as error:  # a library or a user's module may raise anything
        raise DomainError(domain, f"rewards.{name}", str(error) or repr(error)) from error


def check_machine(rewards: Mapping[str, Mapping[str, RewardSettings]]) -> None:
    """Raise DomainError where this machine can never run a reward, before anything is sampled."""
    for domain, own in rewards.items():
        for name, settings in own.items():
            try:
                settings.check_machine()
            except RewardError as error:
                raise DomainError(domain, f"rewards.{name}", str(error)) from error


def cautions(rewards: Mapping[str, Mapping[str, RewardSettings]]) -> Iterator[str]:
    """Yield the warnings about these domains' rewards, each a line that starts with its key."""
    for domain, own in rewards.items():
        for name, settings in own.items():
            if caution := settings.caution():
                yield f"domains.{domain}.rewards.{name}.{caution}"
