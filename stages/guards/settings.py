"""Settings of guards, the stop rule and gates. Never imports torch.

`pipeline.run.gates` compares with the gates' bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

import stages.guards.rules  # noqa: F401  every guard registers itself
from parallel.settings import Count, Fraction, Settings
from stages.guards.registry import GUARDS, AtLeastZero

# The blocks depend on the files that stand in `stages.guards.rules`.
if TYPE_CHECKING:

    class GuardsSettings(Settings):
        def __getattr__(self, name: str) -> Any: ...
else:

    class _Guards(Settings):
        # Configurations of earlier versions have this key.
        renamed: ClassVar[dict[str, str]] = {"flat_groups": "zero_variance"}

    GuardsSettings = create_model(
        "GuardsSettings",
        __base__=_Guards,
        __doc__="The known ways in which reinforcement learning fails, a guard for each.",
        __module__=__name__,
        **{name: (guard, guard.model_validate({})) for name, guard in GUARDS.items()},
    )


class StopSettings(Settings):
    """The rule that ends a stage as done before its last step: it has learned enough."""

    metric: Annotated[str, Field(pattern=r"^(reward|reward/.+|all_right)$")] = Field(
        default="reward", description="reward, reward/NAME of one of its rewards, or all_right"
    )
    at_least: float = Field(description="mean of the metric at which the stage ends")
    window: Count = Field(default=10, description="steps that the mean is taken over")


class GateSettings(Settings):
    """The measurement before the next stage may start, and the action where it fails."""

    domains: tuple[str, ...] | None = Field(
        default=None, description="domains that it measures; null: all of the stage's"
    )

    problems: Count = Field(
        default=500, description="held-out problems of each domain that a model is measured on"
    )
    samples_per_problem: Annotated[int, Field(gt=0, le=256)] = Field(
        default=1,
        description="answers to each problem; the accuracy is the mean over all. Where answers are"
        " sampled, eight to each problem show what one to each of eight times the problems does",
    )
    on_failure: Literal["warn", "stop"] = Field(
        default="stop",
        description="warn: print a warning and continue. stop: start no stage that depends on it",
    )


class GainGateSettings(GateSettings):
    """The gate of a trained stage: better than its parent on its domains, and within bounds."""

    min_gain: Annotated[float, Field(ge=-1, le=1)] = Field(
        default=0.0,
        description="minimum of the lower 95 % bound of the accuracy gain over the parent on the"
        " same problems, as a fraction",
    )
    window: Count = Field(
        default=20, description="last steps of the stage that the bounds below apply to"
    )
    max_mismatch: AtLeastZero | None = Field(
        default=None, description="bound of mismatch_max in each of these steps, nats; null: none"
    )
    min_router_agreement: Fraction | None = Field(
        default=None, description="bound of router_agreement in each of these steps; null: none"
    )
    max_drift: Fraction | None = Field(
        default=None, description="bound of the mean drift_high_ratio; null: none"
    )
    max_router_movement: AtLeastZero | None = Field(
        default=None, description="bound of the mean router_movement, nats; null: none"
    )
    max_kl: AtLeastZero | None = Field(
        default=None, description="bound of the mean kl, nats; null: none"
    )


class MergeGateSettings(GateSettings):
    """The gate of a merge: it keeps what each teacher can do on the teacher's own domain."""

    min_kept: Fraction = Field(
        default=0.95,
        description="minimum share of a teacher's accuracy on the same problems; below it is a"
        " warning, and a stop where the whole 95 % interval is below",
    )


class LossGateSettings(GateSettings):
    """The gate of a quantized model: it loses little of its parent's accuracy on each domain."""

    max_loss: Fraction = Field(
        default=0.02,
        description="maximum of the upper 95 % bound of the accuracy lost to the parent on the same"
        " problems, as a fraction",
    )
