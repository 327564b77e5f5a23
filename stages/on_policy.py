"""The step that GRPO and distillation share: refit, roll out, compare, train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from parallel import batch
from parallel.batch import MicroBatch
from parallel.distributed import broadcast, is_main
from parallel.packing import Place
from parallel.policy import TrainedPolicy
from parallel.sample import Sample
from stages.agreement import MismatchError, measure_mismatch
from stages.metrics import token_efficiency
from stages.rollout import Rollouts, stopwatch
from stages.settings import LoopSettings, RoutingSettings, SamplingSettings, StageJob

ATTEMPTS = 2


@dataclass
class Rollout:
    """What the main rank sampled and graded: the samples of each update, where every domain's
    prompts continue, and what there is to log."""

    updates: list[list[Sample]]
    cursors: dict[str, int]
    metrics: dict[str, float]


class OnPolicyStage(ABC):
    """A stage whose policy learns from its own samples. A subclass says what and how."""

    def __init__(
        self,
        job: StageJob,
        policy: TrainedPolicy,
        sampling: SamplingSettings,
        routing: RoutingSettings,
        loop: LoopSettings,
    ) -> None:
        self.job = job
        self.policy = policy
        self.sampling = sampling
        self.replay = routing.replay == "r3"
        self.loop = loop
        self.rollouts = Rollouts(job)
        self.cursors: dict[str, int] = {}

    @abstractmethod
    def roll_out(self, purpose: str) -> Rollout:
        """Sample and grade one step's rollouts, a pure function of the weights, the cursors and
        `purpose`. Main rank only."""

    @abstractmethod
    def update(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """One optimizer step on `batches`, this rank's share of `samples`."""

    @abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """How good the policy of a step is, by the step's metrics; the higher, the better."""

    def split(self, samples: list[Sample]) -> list[MicroBatch]:
        """This rank's micro-batches of one update."""
        budget = self.loop.micro_batch_tokens
        return batch.split(samples, Place.here(), budget, self.replay)

    def step(self, step: int) -> dict[str, float]:
        """Refit, roll out, hold engine and trainer to the same log-probabilities, and train.

        Raises MismatchError when they disagree twice. Once may be rounding: among a million tokens
        a few are so ill-conditioned that fp32 cannot tell them better. A wrong refit is wrong
        again.
        """
        seconds: dict[str, float] = {}
        bound = self.job.settings.engine.max_logprob_difference
        for attempt in range(ATTEMPTS):
            with stopwatch(seconds, "seconds_refit"):
                self.rollouts.refit(self.policy, version=step)
            with stopwatch(seconds, "seconds_rollout"):
                purpose = f"step {step}, attempt {attempt}"
                rollout = broadcast(self.roll_out(purpose) if is_main() else None)
            with stopwatch(seconds, "seconds_train"):
                updates = [self.split(samples) for samples in rollout.updates]
                mismatch = measure_mismatch(
                    self.policy,
                    [part for batches in updates for part in batches],
                    self.sampling.temperature,
                )
            if mismatch["mismatch_max"] <= bound:
                break
        else:
            raise MismatchError(mismatch["mismatch_max"], bound)
        self.cursors = rollout.cursors
        with stopwatch(seconds, "seconds_train"):
            trained = self._train(rollout, updates)
        if is_main():
            samples = [sample for drawn in rollout.updates for sample in drawn]
            self.rollouts.record(samples, step)
        efficiency = token_efficiency([part for batches in updates for part in batches])
        return {**rollout.metrics, **mismatch, **trained, **efficiency, **broadcast(seconds)}

    def state(self) -> dict[str, Any]:
        """Where every domain's prompts continue."""
        return {"cursors": self.cursors}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the prompts from there."""
        self.cursors = state["cursors"]

    def _train(self, rollout: Rollout, updates: list[list[MicroBatch]]) -> dict[str, float]:
        rate = self.policy.learning_rate
        measured = [
            self.update(samples, batches)
            for samples, batches in zip(rollout.updates, updates, strict=True)
        ]
        mean = {
            name: sum(update[name] for update in measured) / len(measured) for name in measured[0]
        }
        return {**mean, "learning_rate": rate}


def rollout_metrics(samples: list[Sample]) -> dict[str, float]:
    """What every stage logs of its rollouts."""
    count = len(samples)
    return {
        "reward": sum(sample.reward or 0.0 for sample in samples) / count,
        "unfinished": sum(not sample.finished for sample in samples) / count,
        "response_tokens": sum(len(sample.response) for sample in samples) / count,
    }
