"""Typed settings of the objective, section by section of the algorithms. Never imports torch.

Where an algorithm is chosen by its `name`, each has a class of its own, and the keys of the others
are unknown to it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.settings import MOST, Fraction, Natural, OptimizerSettings, Settings

AboveZero = Annotated[float, Field(gt=0)]
# The ratio is clipped to 1 - clip_low, which should not be below 0.
BelowOne = Annotated[float, Field(gt=0, le=1)]
Coefficient = Annotated[float, Field(ge=0)]


def _by_name(default: str) -> Discriminator:
    """Which class is meant: the `name` that is given, else the default."""

    def name(given: Any) -> str:
        if isinstance(given, dict):
            return str(given.get("name", default))
        return str(getattr(given, "name", default))

    return Discriminator(name)


# Section 1: advantages


OF_THE_BATCH = ("reinforce_pp",)  # advantages that compare no responses to the same prompt


class Standardised(Settings):
    """An advantage that is divided by a standard deviation; `std` names which."""

    std: Literal["population", "sample"] = "sample"


class GrpoSettings(Standardised):
    """Against the mean of the group, in its standard deviations."""

    name: Literal["grpo"] = "grpo"


class DrGrpoSettings(Settings):
    """Against the mean of the group."""

    name: Literal["dr_grpo"] = "dr_grpo"


class RlooSettings(Settings):
    """Against the mean of the others of the group."""

    name: Literal["rloo"] = "rloo"


class ReinforcePPSettings(Standardised):
    """Against the mean of the whole batch, in its standard deviations."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    over: Literal["responses", "tokens"] = Field(
        default="responses",
        description="what mean and deviation are over; tokens, as in verl and OpenRLHF, counts a"
        " response once for each of its tokens",
    )


class ReinforcePPBaselineSettings(Standardised):
    """Against the mean of the group, in standard deviations of the whole batch."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


class MoGrpoSettings(Standardised):
    """Every part of the reward by itself as `grpo`, then their weighted sum."""

    name: Literal["mo_grpo"] = "mo_grpo"


class GdpoSettings(Standardised):
    """As `mo_grpo`, then in standard deviations of the whole batch."""

    name: Literal["gdpo"] = "gdpo"


class GfpoSettings(Standardised):
    """As `grpo` among the responses of a group that are kept; the others get 0."""

    name: Literal["gfpo"] = "gfpo"
    keep: Annotated[int, Field(ge=2, le=MOST)] = Field(
        default=4, description="responses of each group"
    )
    by: Literal["length", "reward_per_token"] = Field(
        default="length", description="keep the shortest, or those with the most reward per token"
    )


class ProcessSettings(Standardised):
    """Every step of a response by its own reward, against all steps of the group."""

    name: Literal["process"] = "process"


class CriticSettings(Settings):
    """A model of values beside the policy, of its family, layout and beginning."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    value_clip: AboveZero = Field(
        default=0.2, description="how far an update may move a value and still gain by it"
    )
    warmup_steps: Natural = Field(
        default=0, description="first steps in which the critic learns and the policy does not"
    )


class GaeSettings(Standardised):
    """Every token against a critic's values (PPO), in standard deviations of all tokens."""

    name: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    lambda_: Fraction = Field(default=0.95, alias="lambda")
    critic: CriticSettings = CriticSettings()


AdvantageSettings = Annotated[
    Annotated[GrpoSettings, Tag("grpo")]
    | Annotated[DrGrpoSettings, Tag("dr_grpo")]
    | Annotated[RlooSettings, Tag("rloo")]
    | Annotated[ReinforcePPSettings, Tag("reinforce_pp")]
    | Annotated[ReinforcePPBaselineSettings, Tag("reinforce_pp_baseline")]
    | Annotated[MoGrpoSettings, Tag("mo_grpo")]
    | Annotated[GdpoSettings, Tag("gdpo")]
    | Annotated[GfpoSettings, Tag("gfpo")]
    | Annotated[ProcessSettings, Tag("process")]
    | Annotated[GaeSettings, Tag("gae")],
    _by_name("grpo"),
]


# Section 2: ratios


class Clipped(Settings):
    """A ratio with PPO's clip, and where the advantage is negative, with a second one."""

    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="the most that a ratio counts where the advantage is negative, such as 3; null"
        " bounds it by nothing",
    )


class SequenceRatioSettings(Clipped):
    """One ratio a response, and its clip (GSPO's). The published bounds are for responses of
    thousands of tokens: a mean log-ratio shrinks with the square root of their number, so that 3e-4
    at 4,000 tokens is about 4e-3 at 20."""

    name: Literal["sequence"] = "sequence"
    clip_low: BelowOne = 3e-4
    clip_high: AboveZero = 4e-4


class SequenceTokenRatioSettings(Clipped):
    """The ratio of the response at every token, whose own gradient counts (GSPO-token's)."""

    name: Literal["sequence_token"] = "sequence_token"
    clip_low: BelowOne = 3e-4
    clip_high: AboveZero = 4e-4


class TokenRatioSettings(Clipped):
    """One ratio a token, and its clip (DAPO's)."""

    name: Literal["token"] = "token"
    clip_low: BelowOne = 0.2
    clip_high: AboveZero = 0.28


class GeometricRatioSettings(Settings):
    """The geometric mean of token ratios, each clipped to exp(-clip_low) and exp(clip_high)."""

    name: Literal["geometric"] = "geometric"
    clip_low: AboveZero = 0.4
    clip_high: AboveZero = 0.4


class RspoRatioSettings(Settings):
    """`geometric`, with every token's ratio lowered, to `floor` of it at most, as routers move."""

    name: Literal["rspo"] = "rspo"
    clip_low: AboveZero = 0.4
    clip_high: AboveZero = 0.4
    floor: Annotated[float, Field(gt=0, le=1)] = 0.8


class CispoRatioSettings(Settings):
    """The token ratio as a weight, no larger than `cap` and no smaller than `floor`."""

    name: Literal["cispo"] = "cispo"
    cap: AboveZero = 6.0
    floor: Fraction = Field(
        default=0.0, description="the paper has none; verl's is 1 - clip_ratio_low, such as 0.8"
    )


RatioSettings = Annotated[
    Annotated[SequenceRatioSettings, Tag("sequence")]
    | Annotated[SequenceTokenRatioSettings, Tag("sequence_token")]
    | Annotated[TokenRatioSettings, Tag("token")]
    | Annotated[GeometricRatioSettings, Tag("geometric")]
    | Annotated[RspoRatioSettings, Tag("rspo")]
    | Annotated[CispoRatioSettings, Tag("cispo")],
    _by_name("sequence"),
]


# Section 3: KL


class KLSettings(Settings):
    """The penalty against another model; a coefficient of 0 computes no reference at all."""

    coefficient: Coefficient = 0.0
    estimator: Literal["k1", "k2", "k3", "unbiased_k3", "full"] = "k3"
    reference: Literal["parent", "cold_start", "ema"] = "parent"
    ema_decay: Fraction = Field(
        default=0.99, description="what the reference `ema` keeps of itself at every update"
    )
    target: AboveZero | None = Field(
        default=None,
        description="nats a token that the coefficient is steered towards, from where it begins",
    )


# Section 4: what drew a sample was not the policy that learns from it


class NoCorrectionSettings(Settings):
    """Every token weighs the same."""

    name: Literal["none"] = "none"


class Correction(Settings):
    """Which ratios of pi_old to mu are taken, and whose."""

    level: Literal["token", "sequence"] = Field(
        default="token", description="sequence: the geometric mean over the response's tokens"
    )
    samples: Literal["auto", "stale", "all"] = Field(
        default="auto",
        description="stale: only what older weights drew, in part or whole. auto: all where"
        " routing.replay is none or model.precision is bf16, since engine and trainer differ then;"
        " else stale",
    )

    def of_all(self, replay: str, precision: str) -> bool:
        """Whether every sample is corrected under this `routing.replay` and `model.precision`."""
        if self.samples == "auto":
            return replay == "none" or precision == "bf16"
        return self.samples == "all"


class TisSettings(Correction):
    """Weights of pi_old / mu, no larger than `cap`."""

    name: Literal["tis"] = "tis"
    cap: AboveZero = 2.0


class IcePopSettings(Correction):
    """Weights of pi_old / mu, 0 outside of [low, high]."""

    name: Literal["icepop"] = "icepop"
    samples: Literal["auto", "stale", "all"] = Field(
        default="all", description="as for tis, whose default is auto"
    )
    low: AboveZero = 0.5
    high: AboveZero = 5.0


CorrectionSettings = Annotated[
    Annotated[NoCorrectionSettings, Tag("none")]
    | Annotated[TisSettings, Tag("tis")]
    | Annotated[IcePopSettings, Tag("icepop")],
    _by_name("tis"),
]


class SequenceMaskSettings(Settings):
    """Leave out bad responses that the policy has moved away from (DeepSeek-V3.2)."""

    enabled: bool = False
    delta: AboveZero = Field(
        default=0.5, description="nats a token by which mu may exceed the policy"
    )


class ObjectiveSettings(Settings):
    """What an expert optimises."""

    advantage: AdvantageSettings = GrpoSettings()
    scaling: Literal["none", "edge"] = Field(
        default="none", description="edge: divide advantages by the response's relative entropy"
    )
    ratio: RatioSettings = SequenceRatioSettings()
    aggregation: Literal["sequence_mean", "token_mean", "constant", "lambda"] = "sequence_mean"
    lambda_learning_rate: AboveZero = Field(
        default=0.1, description="of the exponent that the aggregation `lambda` learns"
    )
    kl: KLSettings = KLSettings()
    entropy_bonus: Coefficient = 0.0
    mask_truncated: bool = Field(
        default=False,
        description="learn nothing from responses that were cut off, which are still what others of"
        " their group are compared with (DAPO's overlong filtering)",
    )
    correction: CorrectionSettings = TisSettings()
    sequence_mask: SequenceMaskSettings = SequenceMaskSettings()
