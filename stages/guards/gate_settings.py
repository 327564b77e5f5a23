"""What a person may set about the gates between stages. Never imports torch.

What is held against these bounds, and how, stands in `pipeline.run.gates`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from parallel.settings import Count, Fraction, Settings

AtLeastZero = Annotated[float, Field(ge=0)]


class GateSettings(Settings):
    """What is measured before the next stage may start, and what happens where it falls short."""

    problems: Count = Field(
        default=500, description="held-out problems of each domain that a model is measured on"
    )
    on_failure: Literal["warn", "stop"] = Field(
        default="stop",
        description="warn: say so, and go on. stop: nothing starts that waits for it",
    )


class ExpertGateSettings(GateSettings):
    """An expert has to beat its parent on its own domain, and to have trained within bounds."""

    min_gain: Annotated[float, Field(ge=-1, le=1)] = Field(
        default=0.0,
        description="accuracy over the parent's, as a fraction, that the lower end of the 95 %"
        " interval of the gain has to reach",
    )
    window: Count = Field(
        default=20, description="the expert's last steps, of which the bounds below are"
    )
    max_mismatch: AtLeastZero | None = Field(
        default=None, description="of mismatch_max, in any of these steps, nats; null bounds none"
    )
    min_router_agreement: Fraction | None = Field(
        default=None, description="of router_agreement, in any of these steps; null bounds none"
    )
    max_drift: Fraction | None = Field(
        default=None, description="of the mean of drift_high_ratio; null bounds none"
    )
    max_router_movement: AtLeastZero | None = Field(
        default=None, description="of the mean of router_movement, nats; null bounds none"
    )
    max_kl: AtLeastZero | None = Field(
        default=None, description="of the mean of kl, nats; null bounds none"
    )


class MergeGateSettings(GateSettings):
    """A merge has to keep what each teacher can do on the teacher's own domain."""

    min_kept: Fraction = Field(
        default=0.95,
        description="share of a teacher's accuracy; below it is a warning, and a stop"
        " where the 95 % interval is below it as a whole",
    )
