"""The weight-space merges, one file each, and the settings that choose one. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.kinds.merge_weights.methods.tensors import WeightMethodBase
from stages.objectives.registry import WEIGHT_METHODS, import_modules

import_modules(__name__, __path__)  # each registers itself

if TYPE_CHECKING:
    WeightMethodSettings = WeightMethodBase
else:
    WeightMethodSettings = WEIGHT_METHODS.settings_union(default="average")
