"""Advantages by name (algorithms, section 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stages.objectives.batch_advantages import reinforce_pp, reinforce_pp_baseline
from stages.objectives.gfpo import gfpo
from stages.objectives.graded import Graded
from stages.objectives.group_advantages import dr_grpo, grpo, rloo
from stages.objectives.part_advantages import gdpo, mo_grpo
from stages.objectives.process import process
from stages.objectives.settings import OF_THE_BATCH, AdvantageSettings

if TYPE_CHECKING:
    from torch import Tensor

# (what was earned, the advantage's own settings) -> one for each response [groups, G], or for each
# token [groups, G, T]
ADVANTAGES: dict[str, Callable[[Graded, Any], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "mo_grpo": mo_grpo,
    "gdpo": gdpo,
    "gfpo": gfpo,
    "process": process,
}


def advantages(graded: Graded, settings: AdvantageSettings) -> Tensor:
    """The advantage of every token, [groups, G, T], with T = 1 where it is one for all tokens.

    In the dtype of the rewards. 0 for responses that are not graded, and where a group has no two
    that are, unless a response is compared with the whole batch.
    """
    if not graded.graded.any():
        return graded.rewards.new_zeros((*graded.rewards.shape, 1))
    found = ADVANTAGES[settings.name](graded, settings)
    tokens = found if found.dim() == 3 else found.unsqueeze(-1)
    useful = graded.graded
    if settings.name not in OF_THE_BATCH:
        useful = useful & graded.comparable.unsqueeze(-1)
    return tokens.masked_fill(~useful.unsqueeze(-1), 0.0)
