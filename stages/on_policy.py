"""The step that GRPO and distillation share: refit, roll out, compare, train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel import batch
from parallel.batch import MicroBatch
from parallel.distributed import broadcast, is_main
from parallel.packing import Place
from parallel.policy import TrainedPolicy
from parallel.sample import Sample
from stages.agreement import measure_mismatch
from stages.backlog import Backlog, Batch
from stages.metrics import token_efficiency
from stages.objectives.importance import truncated_importance
from stages.rollout import Rollouts, stopwatch
from stages.rollout_modes import Drawn, mode_of
from stages.scoring import reward_metrics
from stages.settings import (
    DomainSettings,
    LoopSettings,
    RolloutSettings,
    RoutingSettings,
    SamplingSettings,
    StageJob,
)


@dataclass
class Rollout:
    """What the main rank sampled and graded: the samples of each update, and what there is to
    log."""

    updates: list[list[Sample]]
    metrics: dict[str, float]


class OnPolicyStage(ABC):
    """A stage whose policy learns from its own samples. A subclass says what and how."""

    def __init__(
        self,
        job: StageJob,
        policy: TrainedPolicy,
        domains: Mapping[str, DomainSettings],
        sampling: SamplingSettings,
        settings: RolloutSettings,
        routing: RoutingSettings,
        loop: LoopSettings,
    ) -> None:
        self.job = job
        self.policy = policy
        self.sampling = sampling
        self.settings = settings
        self.replay = routing.replay == "r3"
        self.loop = loop
        self.rollouts = Rollouts(job, policy)
        self._backlog: Backlog | None = None
        if is_main():
            self._backlog = Backlog(job, domains, sampling, self.rollouts)
        self.mode = mode_of(self)

    @property
    def backlog(self) -> Backlog:
        """The main rank's."""
        assert self._backlog is not None, "only the main rank has prompts"
        return self._backlog

    @abstractmethod
    def share_out(self, batch: Batch) -> Rollout:
        """A step's graded groups as the samples of each update, with their advantages, and with
        the metrics of this kind of stage. Main rank only."""

    @abstractmethod
    def update(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """One optimizer step on `batches`, this rank's share of `samples`."""

    @abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """How good the policy of a step is, by the step's metrics; the higher, the better."""

    def step(self, step: int) -> dict[str, float]:
        """Refit, roll out, hold engine and trainer to the same log-probabilities, and train; the
        stage's mode says in which order."""
        seconds: dict[str, float] = {}
        drawn = self.mode.draw(step, seconds)
        with stopwatch(seconds, "seconds_train"):
            trained = self._train(drawn)
        if is_main():
            self.rollouts.record([s for samples in drawn.rollout.updates for s in samples], step)
        efficiency = token_efficiency([part for batches in drawn.updates for part in batches])
        logged = {**drawn.rollout.metrics, **drawn.metrics, **trained, **efficiency}
        return {**logged, **broadcast({**seconds, **self.rollouts.events()})}

    def compose(self, batch: Batch, step: int) -> Rollout:
        """What step `step` trains on, with all that is known of its rollouts. Main rank only."""
        rollout = self.share_out(batch)
        samples = [sample for group in batch.groups for sample in group.samples]
        rollout.metrics.update(
            **rollout_metrics(samples),
            **staleness_metrics(samples, step, self.settings.max_staleness),
            dropped_stale=float(batch.too_old),
            reward_failures=float(batch.failures),
        )
        return rollout

    def split(self, samples: list[Sample]) -> list[MicroBatch]:
        """This rank's micro-batches of one update."""
        budget = self.loop.micro_batch_tokens
        return batch.split(samples, Place.here(), budget, self.replay)

    def prepare(
        self, rollout: Rollout, step: int
    ) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """This rank's micro-batches of each update, with pi_old; and how far it is from mu.
        Collective."""
        updates = [self.split(samples) for samples in rollout.updates]
        parts = [part for batches in updates for part in batches]
        differences = measure_mismatch(self.policy, parts, self.sampling.temperature)
        for part in parts:
            part.importance = _importance(part, step)
        return updates, differences

    def state(self) -> dict[str, Any]:
        """Where every domain's prompts continue. What the main rank says is saved."""
        return self._backlog.state() if self._backlog else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the prompts from there."""
        if self._backlog:
            self._backlog.restore(state)

    def close(self) -> None:
        """Leave the engines and the rewards."""
        self.rollouts.close()
        if self._backlog:
            self._backlog.close()

    def _train(self, drawn: Drawn) -> dict[str, float]:
        rate = self.policy.learning_rate
        measured = [
            self.update(samples, batches)
            for samples, batches in zip(drawn.rollout.updates, drawn.updates, strict=True)
        ]
        mean = {
            name: sum(update[name] for update in measured) / len(measured) for name in measured[0]
        }
        return {**mean, "learning_rate": rate}


def rollout_metrics(samples: list[Sample]) -> dict[str, float]:
    """What every stage logs of its rollouts."""
    count = len(samples)
    return {
        **reward_metrics(samples),
        "unfinished": sum(not sample.finished for sample in samples) / count,
        "response_tokens": sum(len(sample.response) for sample in samples) / count,
    }


def staleness_metrics(samples: list[Sample], version: int, most: int) -> dict[str, float]:
    """How many training steps the oldest weights of each sample lie behind `version`: the mean, the
    largest, and the share of every age up to `most`."""
    ages = Counter(version - sample.weight_version for sample in samples)
    return {
        "staleness_mean": sum(age * count for age, count in ages.items()) / len(samples),
        "staleness_max": float(max(ages)),
        **{f"staleness_{age}": ages[age] / len(samples) for age in range(most + 1)},
    }


def _importance(part: MicroBatch, version: int) -> torch.Tensor | None:
    """What the samples of a micro-batch weigh, [B]: 1 where the weights of `version` drew them."""
    stale = torch.tensor([sample.weight_version < version for sample in part.samples])
    if part.old_logprobs is None or not stale.any():
        return None
    weights = truncated_importance(part.old_logprobs, part.engine_logprobs, part.mask)
    return weights.where(stale.to(weights.device), torch.ones_like(weights))
