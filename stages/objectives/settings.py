"""The settings of an objective: one algorithm of each registry. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from parallel.settings import Settings
from stages.objectives.advantages.grpo import GrpoSettings
from stages.objectives.correction import (
    CorrectionSettings,
    SequenceMaskSettings,
    TisSettings,
)
from stages.objectives.graded import AdvantageBase
from stages.objectives.kl import KLSettings
from stages.objectives.ratios.sequence import SequenceRatioSettings
from stages.objectives.registry import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    RATIOS,
    AboveZero,
    Registry,
)
from stages.objectives.surrogate import RatioBase

# Every algorithm is imported by here. The type checker knows the base classes: the unions depend on
# the files that stand in the packages.
if TYPE_CHECKING:
    AdvantageSettings = AdvantageBase
    RatioSettings = RatioBase
else:
    AdvantageSettings = ADVANTAGES.settings_union(default="grpo")
    RatioSettings = RATIOS.settings_union(default="sequence")

REGISTRIES: tuple[Registry, ...] = (ADVANTAGES, RATIOS, AGGREGATIONS, KL_ESTIMATORS, CORRECTIONS)


class ObjectiveSettings(Settings):
    """The objective of a policy: advantages, loss and penalties."""

    advantage: AdvantageSettings = GrpoSettings()
    scaling: Literal["none", "edge"] = Field(
        default="none", description="edge: divide advantages by the response's relative entropy"
    )
    ratio: RatioSettings = SequenceRatioSettings()
    aggregation: Literal["sequence_mean", "token_mean", "constant", "lambda"] = Field(
        default="sequence_mean", description="mean of the tokens' losses"
    )
    lambda_learning_rate: AboveZero = Field(
        default=0.1, description="of the exponent that the aggregation `lambda` learns"
    )
    kl: KLSettings = KLSettings()
    entropy_bonus: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="coefficient of the entropy, over the whole vocabulary"
    )
    mask_truncated: bool = Field(
        default=False,
        description="train on no token of truncated responses, which still count in the baseline of"
        " their group (DAPO's overlong filtering)",
    )
    correction: CorrectionSettings = TisSettings()
    sequence_mask: SequenceMaskSettings = SequenceMaskSettings()

    @property
    def needs_entropies(self) -> bool:
        """True where the entropies of pi_old are read, which cost a forward pass."""
        return self.scaling == "edge"

    @property
    def learns_length_weights(self) -> bool:
        """True where responses are weighted by a learned power of their length."""
        return self.aggregation == "lambda"

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, message) for each contradiction between these settings."""
        blocks = ("advantage", "kl", "ratio", "correction")
        for block in blocks:
            for key, message in getattr(self, block).violations(group_size):
                yield f"{block}.{key}", message
        if self.advantage.per_token and self.ratio.per_response:
            yield (
                "ratio.name",
                f"{self.ratio.name} gives all tokens of a response one gradient, which undoes the"
                f" advantage {self.advantage.name} of each; use token, sequence_token or cispo",
            )
