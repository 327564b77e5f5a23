"""The policy ratio and its clipped surrogate, by name (algorithms, section 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stages.objectives.sequence_ratio import sequence_ratio
from stages.objectives.surrogate import Surrogate
from stages.objectives.token_ratio import token_ratio

if TYPE_CHECKING:
    from torch import Tensor

# (log_ratio [B, T], advantages [B], mask [B, T], the ratio's own settings) -> Surrogate
RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor, Any], Surrogate]] = {
    "sequence": sequence_ratio,
    "token": token_ratio,
}
