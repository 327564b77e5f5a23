"""The methods of a merge, one file each, and the settings that choose one. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.kinds.distill.teaching import MethodBase
from stages.objectives.registry import METHODS, import_modules

import_modules(__name__, __path__)  # each registers itself

if TYPE_CHECKING:
    MethodSettings = MethodBase
else:
    MethodSettings = METHODS.settings_union(default="full_vocab_reverse_kl")
