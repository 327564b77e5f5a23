"""The policy ratio and its clipped surrogate, by name (algorithms, section 2)."""

from __future__ import annotations

from collections.abc import Callable

from stages.objectives.cispo_ratio import cispo_ratio
from stages.objectives.geometric_ratio import geometric_ratio, rspo_ratio
from stages.objectives.sequence_ratio import sequence_ratio, sequence_token_ratio
from stages.objectives.surrogate import Surrogate
from stages.objectives.token_ratio import token_ratio

# (log pi_theta, log pi_old, advantages, mask, each [B, T], the ratio's own settings) -> Surrogate.
# What is masked may be any finite number. `rspo` is also given how far the routers moved.
RATIOS: dict[str, Callable[..., Surrogate]] = {
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
    "token": token_ratio,
    "geometric": geometric_ratio,
    "rspo": rspo_ratio,
    "cispo": cispo_ratio,
}
