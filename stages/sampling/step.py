"""The step that GRPO and distillation share: refit, roll out, compare, train."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel import batch
from parallel.batch import MicroBatch
from parallel.distributed import broadcast, is_main
from parallel.engine.log import RolloutLog
from parallel.engine.wire import keeps_part, kept_limits, model_digest
from parallel.files import read_checkpoint, whole_checkpoints
from parallel.model.policy import TrainedPolicy
from parallel.packing import RankPlace
from parallel.sample import Sample
from stages.metrics import token_efficiency
from stages.objectives.correction import CorrectionSettings, correction_weights
from stages.objectives.groups import Group
from stages.sampling.engines import Rollouts, stopwatch
from stages.sampling.logprob_check import compare, measure_mismatch
from stages.sampling.prompt_buffer import Backlog, Batch
from stages.sampling.reward_dispatch import reward_metrics
from stages.sampling.rollout_modes import mode_of
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


@dataclass
class Prepared:
    """This rank's micro-batches of each update, with pi_old, and how far that is from mu.

    `measured` is what `gradients` gave where those of the first update are in the policy already.
    """

    updates: list[list[MicroBatch]]
    differences: dict[str, float]
    measured: dict[str, float] | None


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
        correction: CorrectionSettings,
        entropies: bool = False,
    ) -> None:
        """`correction` says what a sample weighs that pi_old did not draw. With `entropies`, every
        batch gets those of pi_old."""
        self.job = job
        self.policy = policy
        self.sampling = sampling
        self.settings = settings
        self.replay = routing.replay == "r3"
        self.loop = loop
        self.correction = correction
        precision = job.settings.model.precision
        self.correct_all = correction.applies_to_all(routing.replay, precision)
        self.entropies = entropies
        # Whether pi_old, where it is the policy itself, may come of the pass with the gradients.
        self.one_pass = not entropies
        self.rollouts = Rollouts(job, policy)
        self._backlog: Backlog | None = None
        if is_main():
            self._backlog = Backlog(job, domains, sampling, self.rollouts)
            self.rollouts.log = RolloutLog(
                job.directory / "rollouts" / "log",
                _origin(job, sampling, settings),
                job.settings.model,
                job.settings.deterministic,
            )
        self.mode = mode_of(self)
        self._resumed = False  # whether a step was begun
        self._version = 0  # of the weights that the present step begins with

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
    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Leave those of one update on `batches`, this rank's share of `samples`, in the policy;
        `remember` what it says of them. Returns what there is to log. Collective."""

    def is_flat(self, group: Group) -> bool:
        """Whether there is nothing to learn from a group, and others may be drawn in its place."""
        return group.zero_variance

    def policy_learns(self, step: int) -> bool:
        """Whether the policy is updated in this step."""
        return True

    def learn(self, measured: dict[str, float]) -> dict[str, float]:
        """Whatever else learns from an update whose gradients were `measured`, once it is made;
        returns what there is to log. Collective."""
        return {}

    @abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """How good the policy of a step is, by the step's metrics; the higher, the better."""

    def step(self, step: int) -> dict[str, float]:
        """Refit, roll out, hold engine and trainer to the same log-probabilities, and train; the
        stage's mode says in which order."""
        seconds: dict[str, float] = {}
        self._tend_log(step)
        drawn = self.mode.draw(step, seconds)
        with stopwatch(seconds, "seconds_train"):
            trained = self._train(drawn.rollout, drawn.prepared)
        if is_main():
            self.rollouts.record(drawn.rollout.updates, step)
        parts = [part for batches in drawn.prepared.updates for part in batches]
        logged = {**drawn.rollout.metrics, **drawn.metrics, **trained, **token_efficiency(parts)}
        return {**logged, **broadcast({**seconds, **self.rollouts.events()})}

    def compose(self, batch: Batch, step: int) -> Rollout:
        """What step `step` trains on, with all that is known of its rollouts. Main rank only."""
        rollout = self.share_out(batch)
        # Replaced groups count: without them the reward would tend to one half.
        drawn = [sample for group in batch.drawn for sample in group.samples]
        trained = [sample for group in batch.groups for sample in group.samples]
        rollout.metrics.update(
            **rollout_metrics(drawn),
            **saturated(trained, self.sampling, self.job.settings.model.vocabulary_size),
            **staleness_metrics(trained, step, self.settings.max_staleness),
            dropped_stale=float(batch.too_old),
            reward_failures=float(batch.failures),
            watch_failures=float(batch.watch_failures),
            too_long=self.backlog.too_long(),
        )
        return rollout

    def split(self, samples: list[Sample]) -> list[MicroBatch]:
        """This rank's micro-batches of one update."""
        budget = self.loop.micro_batch_tokens
        return batch.split(samples, RankPlace.here(), budget, self.replay)

    def divide(self, rollout: Rollout) -> list[list[MicroBatch]]:
        """This rank's micro-batches of every update, as the updates find them. Collective."""
        return [self.split(samples) for samples in rollout.updates]

    def prepare(self, rollout: Rollout, step: int) -> Prepared:
        """Split the samples, and compare pi_old to mu. Collective.

        Where there is one update of the policy, one pass gives pi_old and the gradients.
        """
        self._version = step
        updates = self.divide(rollout)
        if self.one_pass and len(updates) == 1 and self.policy_learns(step):
            self.policy.agreement.start()
            measured = self.gradients(rollout.updates[0], updates[0])
            return Prepared(updates, compare(self.policy, updates[0]), measured)
        parts = [part for batches in updates for part in batches]
        temperature = self.sampling.temperature
        differences = measure_mismatch(self.policy, parts, temperature, self.entropies)
        for part in parts:
            part.weights = self._weights(part)
        return Prepared(updates, differences, measured=None)

    def remember(self, part: MicroBatch, log_probs: torch.Tensor) -> None:
        """Take what the policy says now for pi_old, where no update has come between."""
        if part.old_logprobs is None:
            part.old_logprobs = log_probs.detach()
            part.weights = self._weights(part)

    def update(
        self,
        samples: list[Sample],
        batches: list[MicroBatch],
        measured: dict[str, float] | None = None,
    ) -> dict[str, float]:
        """One optimizer step, by gradients that were `measured` already, or are now. Collective."""
        if measured is None:
            measured = self.gradients(samples, batches)
        routing = self.policy.routing_metrics()
        norm = self.policy.step()
        return {**measured, **routing, **self.learn(measured), "gradient_norm": norm}

    def state(self) -> dict[str, Any]:
        """Where every domain's prompts continue. What the main rank says is saved."""
        return self._backlog.state() if self._backlog else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the prompts from there."""
        if self._backlog:
            self._backlog.restore(state)

    def close(self) -> None:
        """Leave the engines and the rewards."""
        self._drop_covered()
        self.rollouts.close()
        if self._backlog:
            self._backlog.close()

    def _tend_log(self, step: int) -> None:
        """Have it know the weights that the stage goes on with, and what a checkpoint covers."""
        if not self._resumed and self.rollouts.log is not None:
            self.rollouts.log.begin(step, later=self.mode.repeats)
        self._resumed = True
        self._drop_covered()

    def _drop_covered(self) -> None:
        if self.rollouts.log is not None:
            found = whole_checkpoints(self.job.directory / "checkpoints")
            self.rollouts.log.cover(found[-1].step if found else 0)

    def stale(self, part: MicroBatch) -> torch.Tensor:
        """Which responses [B, 1] older weights drew, in part or whole; bool."""
        ages = [sample.weight_version < self._version for sample in part.samples]
        return torch.tensor(ages, device=part.mask.device).unsqueeze(-1)

    def _weights(self, part: MicroBatch) -> torch.Tensor | None:
        """What multiplies the surrogate of every token, [B, R]; None where nothing is corrected."""
        if part.old_logprobs is None or self.correction.name == "none":
            return None
        found = correction_weights(
            part.old_logprobs, part.engine_logprobs, part.mask, self.correction
        )
        return found if self.correct_all else found.where(self.stale(part), 1.0)

    def _train(self, rollout: Rollout, prepared: Prepared) -> dict[str, float]:
        rate = self.policy.learning_rate
        known = [prepared.measured] + [None] * (len(prepared.updates) - 1)
        measured = [
            self.update(*each)
            for each in zip(rollout.updates, prepared.updates, known, strict=True)
        ]
        values: dict[str, list[float]] = {}
        for update in measured:
            for name, value in update.items():
                values.setdefault(name, []).append(value)
        mean = {name: sum(of) / len(of) for name, of in values.items()}
        return {**mean, "learning_rate": rate}


def _origin(job: StageJob, sampling: SamplingSettings, settings: RolloutSettings) -> str:
    """The digest of what decides, beside a question, what the engines answer in this stage."""
    parent = read_checkpoint(job.parent) if job.parent is not None else None
    parts = [
        job.stage,
        job.settings.deterministic,
        model_digest(job.settings.model),
        parent.digest if parent is not None else None,
        sampling.model_dump(),
        settings.model_dump(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def rollout_metrics(samples: list[Sample]) -> dict[str, float]:
    """What every stage logs of its rollouts."""
    count = len(samples)
    return {
        **reward_metrics(samples),
        "unfinished": sum(not sample.finished for sample in samples) / count,
        "response_tokens": sum(len(sample.response) for sample in samples) / count,
    }


def saturated(
    samples: list[Sample], sampling: SamplingSettings, vocabulary: int
) -> dict[str, float]:
    """The share of tokens whose kept set is as large as the engine was asked for, and may have been
    larger; nothing where sampling keeps the whole vocabulary."""
    if not keeps_part(sampling.top_k, sampling.top_p):
        return {}
    _, most = kept_limits(sampling.top_k, sampling.top_p, vocabulary)
    sizes = [len(kept) for sample in samples for kept in sample.kept or []]
    full = sum(size >= most for size in sizes) if most < vocabulary else 0
    return {"kept_saturated": full / max(len(sizes), 1)}


def staleness_metrics(samples: list[Sample], version: int, most: int) -> dict[str, float]:
    """How many training steps the oldest weights of each sample lie behind `version`: the mean, the
    largest, and the share of every age up to `most`."""
    ages = Counter(version - sample.weight_version for sample in samples)
    return {
        "staleness_mean": sum(age * count for age, count in ages.items()) / len(samples),
        "staleness_max": float(max(ages)),
        **{f"staleness_{age}": ages[age] / len(samples) for age in range(most + 1)},
    }
