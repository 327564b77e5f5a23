"""Typed settings of the objective: advantage, ratio, aggregation, KL. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from parallel.settings import Settings


class AdvantageSettings(Settings):
    """Section 1 of the algorithms; `std` names which standard deviation divides."""

    name: Literal["grpo", "dr_grpo"] = "grpo"
    std: Literal["population", "sample"] = "sample"


class SequenceRatioSettings(Settings):
    """Section 2: one ratio a response, and its clip (GSPO's)."""

    name: Literal["sequence"] = "sequence"
    clip_low: Annotated[float, Field(gt=0)] = 3e-4
    clip_high: Annotated[float, Field(gt=0)] = 4e-4


class TokenRatioSettings(Settings):
    """Section 2: one ratio a token, and its clip (DAPO's)."""

    name: Literal["token"] = "token"
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28


def _ratio_name(given: Any) -> str:
    """Which settings are meant: a ratio that states no `name` is a sequence's."""
    if isinstance(given, dict):
        return str(given.get("name", "sequence"))
    return str(getattr(given, "name", "sequence"))


RatioSettings = Annotated[
    Annotated[SequenceRatioSettings, Tag("sequence")] | Annotated[TokenRatioSettings, Tag("token")],
    Discriminator(_ratio_name),
]


class KLSettings(Settings):
    """Section 3: the penalty against the parent checkpoint; 0 computes no reference at all."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    estimator: Literal["k1", "k2", "k3", "unbiased_k3"] = "k3"
    reference: Literal["parent"] = "parent"


class ObjectiveSettings(Settings):
    """What an expert optimises."""

    advantage: AdvantageSettings = AdvantageSettings()
    ratio: RatioSettings = SequenceRatioSettings()
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    kl: KLSettings = KLSettings()
