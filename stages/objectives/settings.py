"""Typed settings of the objective: advantage, ratio, aggregation, KL. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from parallel.settings import Settings


class AdvantageSettings(Settings):
    """Section 1 of the algorithms; `std` names which standard deviation divides."""

    name: Literal["grpo", "dr_grpo"] = "grpo"
    std: Literal["population", "sample"] = "sample"


class RatioSettings(Settings):
    """Section 2: the policy ratio and its clip."""

    name: Literal["sequence", "token"] = "sequence"
    clip_low: Annotated[float, Field(gt=0)] = 3e-4
    clip_high: Annotated[float, Field(gt=0)] = 4e-4


class KLSettings(Settings):
    """Section 3: the penalty against the parent checkpoint; 0 computes no reference at all."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    estimator: Literal["k1", "k2", "k3", "unbiased_k3"] = "k3"
    reference: Literal["parent"] = "parent"


class ObjectiveSettings(Settings):
    """What an expert optimises."""

    advantage: AdvantageSettings = AdvantageSettings()
    ratio: RatioSettings = RatioSettings()
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    kl: KLSettings = KLSettings()
