"""The kinds of rewards, each a module that registers itself, and the union of their settings.

A file here is all that a new kind needs: its settings join `RewardSettings`, the schema, `--help`
and the generated reference. Imports no torch.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from operator import or_
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from stages.rewards.reward import REGISTERED, RewardBase

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
KINDS = dict(sorted(REGISTERED.items()))  # whichever was imported first

if TYPE_CHECKING:
    RewardSettings = RewardBase
else:
    RewardSettings = Annotated[
        reduce(or_, (kind.settings for kind in KINDS.values())), Field(discriminator="kind")
    ]
