"""The weight-space merges, one file each, and the settings that choose one. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.registry import WEIGHT_METHODS, import_modules
from stages.weight_merging.tensors import WeightMethodBase

import_modules(__name__, __path__)  # each registers itself

if TYPE_CHECKING:
    WeightMethodSettings = WeightMethodBase
else:
    WeightMethodSettings = WEIGHT_METHODS.settings_union(default="average")
