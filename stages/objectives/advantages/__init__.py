"""The advantages, one file each (algorithms, section 1). Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.graded import AdvantageBase, Graded
from stages.objectives.registry import ADVANTAGES, import_modules

if TYPE_CHECKING:
    from torch import Tensor

import_modules(__name__, __path__)


def compute_advantages(graded: Graded, settings: AdvantageBase) -> Tensor:
    """Return the advantage of every token, [groups, G, T], T = 1 where a response has only one.

    In the dtype of the rewards. 0 for responses that are not graded, and in groups with fewer than
    two graded responses, unless the baseline is the batch's.
    """
    if not graded.graded.any():
        return graded.rewards.new_zeros((*graded.rewards.shape, 1))
    found = ADVANTAGES[settings.name](graded, settings)
    tokens = found if found.dim() == 3 else found.unsqueeze(-1)
    useful = graded.graded
    if settings.baseline == "group":
        useful = useful & graded.comparable.unsqueeze(-1)
    return tokens.masked_fill(~useful.unsqueeze(-1), 0.0)
