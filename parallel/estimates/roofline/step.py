"""The seconds of a whole step: its workload, and what its phases add up to."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.estimates.roofline.hardware import DataSheet, Efficiencies
from parallel.estimates.roofline.rollout import rollout_seconds
from parallel.estimates.roofline.training import training_seconds
from parallel.estimates.roofline.work import StepWorkload
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step's phases; `bubble` is the share of training that ranks idle."""

    rollout: float
    logprobs: float
    train: float
    weight_sync: float
    other: float
    bubble: float
    overlapped: bool

    @property
    def total(self) -> float:
        """The seconds of a step; where it overlaps, of the slower of sampling and training."""
        trainer = self.logprobs + self.train
        both = max(self.rollout, trainer) if self.overlapped else self.rollout + trainer
        return both + self.weight_sync + self.other

    @property
    def rollout_share(self) -> float:
        """The seconds of sampling as a share of those of sampling and training."""
        both = self.rollout + self.logprobs + self.train
        return self.rollout / both if both else 0.0


def step_seconds(
    model: ModelSettings,
    layout: LayoutSettings,
    engine: EngineSettings | None,
    work: StepWorkload,
    gpu: DataSheet,
    reached: Efficiencies,
    weight_sync: float = 0.0,
) -> StepSeconds:
    """Return the seconds of a step.

    Args:
        model, layout: without `layout_violations`.
        engine: None for a stage that samples nothing.
        gpu: of trainer and engines alike.
        weight_sync: the seconds of it.
    """
    forward, train, bubble = training_seconds(model, layout, work, gpu, reached)
    return StepSeconds(
        rollout=rollout_seconds(model, engine, work, gpu, reached) if engine else 0.0,
        logprobs=work.passes * forward,
        train=train,
        weight_sync=weight_sync,
        other=reached.step if engine else 0.0,
        bubble=bubble,
        overlapped=work.steps_in_flight > 1,
    )
