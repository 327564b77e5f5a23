"""The kinds of stages: a room for each of this package, and those that other packages bring.

An installed package brings kinds by naming modules under the entry point `braid.stages`. Never
imports torch.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from importlib.metadata import entry_points
from operator import or_
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.kinds.kind import KINDS, StageSettings

ENTRY_POINT = "braid.stages"

for _room in iter_modules(__path__):
    if _room.ispkg:
        import_module(f"{__name__}.{_room.name}.settings")
# By name: of two kinds with one name the same one is refused on every machine.
for _entry in sorted(entry_points(group=ENTRY_POINT), key=lambda point: point.name):
    try:
        _entry.load()
    except Exception as error:
        raise ImportError(
            f"{_entry.value}, which an installed package names as the entry point {ENTRY_POINT}:"
            f" {_entry.name}, cannot be imported: {error!r}; fix or uninstall the package"
        ) from error

if TYPE_CHECKING:
    Kind = str
    AnyStageSettings = StageSettings
else:
    # Sorted, since messages list them, and rooms are imported before packages.
    Kind = Literal[*sorted(KINDS)]
    AnyStageSettings = Annotated[
        reduce(or_, (kind.settings for kind in KINDS.values() if kind.settings)),
        Field(discriminator="kind"),
    ]
# What `python -m stages.main` runs: the kinds, and the preview of a domain outside a run.
MODULES: dict[str, str] = {name: kind.work for name, kind in KINDS.items()}
MODULES["preview"] = "stages.domain_tools.preview"
