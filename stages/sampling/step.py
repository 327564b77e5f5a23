"""The step of every stage whose policy learns from its own samples, and what it consists of."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from parallel import batch
from parallel.batch import MicroBatch, RankPlace, Responses
from parallel.distributed import broadcast, is_main, scatter
from parallel.mismatch import bounds_of
from parallel.model.policy import TrainedPolicy
from parallel.sample import Sample
from parallel.settings import OptimizerSettings
from parallel.timeline import phase
from stages.domains import (
    DomainSettings,
    LoopSettings,
    RolloutSettings,
    RoutingSettings,
    SamplingSettings,
)
from stages.metrics import batch_metrics, mean_of_updates, token_efficiency
from stages.objectives.groups import Batch, Group
from stages.objectives.surrogate import (
    CorrectionSettings,
    NoCorrectionSettings,
    correction_weights,
)
from stages.sampling.engines import StageEngines, rollout_log
from stages.sampling.logprob_check import (
    ATTEMPTS,
    Mismatch,
    MismatchError,
    compare,
    measure_mismatch,
)
from stages.sampling.prompt_buffer import Prefetcher, PromptBuffer
from stages.sampling.recording import collect_observed, observe
from stages.settings import StageJob

# Of a step, by the metric of its seconds.
PHASES = {
    "seconds_refit": "weight sync",
    "seconds_rollout": "rollout",
    "seconds_wait": "collect",
    "seconds_train": "train",
}
# Responses that show whether a weight sync is right. A model that thinks is all but certain of its
# first 8 tokens, whatever the weights: they show nothing in bf16.
PROBES_PER_ENGINE, PROBE_TOKENS = 4, 64


@dataclass
class StepSamples:
    """The samples of each update of a step, with advantages, and the metrics of its rollouts.

    On ranks other than the main one only the samples of the rank's own micro-batches are whole, the
    others are outlines.
    """

    updates: list[list[Sample]]
    metrics: dict[str, float]


@dataclass
class Update:
    """The samples of one update, and this rank's micro-batches of them.

    Its log-probabilities are `checked` where a pass before the update compared them.

    Example: 8 samples, 2 data-parallel ranks, micro_batch_tokens = 96:
        samples   8, of which the 4 of the other rank are outlines
        batches   2 micro-batches of this rank's 4: 30 + 41 tokens, and 52 + 37
        checked   False: the pass with the gradients will compare pi_old with mu
    """

    samples: list[Sample]
    batches: list[MicroBatch]
    checked: bool = False


class TrainingBlocks(Protocol):
    """The blocks that a stage states of how its policy samples and trains."""

    @property
    def sampling(self) -> SamplingSettings: ...
    @property
    def routing(self) -> RoutingSettings: ...
    @property
    def optimizer(self) -> OptimizerSettings: ...
    @property
    def loop(self) -> LoopSettings: ...


class OnPolicyStage(ABC):
    """A stage whose policy learns from its own samples; a subclass is one way to learn.

    The policy's weights at the start of step v are version v.

    Example: step 3 of two prompts, group_size = 4, one update, two data-parallel ranks, sync:
        weight sync  the engines get version 3                        `StageEngines.sync_weights`
        prompts      2 groups, each of its prompt and 4 seeds         `PromptBuffer.request`
        rollout      8 responses with mu and routes, of version 3     `StageEngines.wait`
        rewards      1 0 0 1 | 0 0 0 0                                `RewardDispatcher.graded`
        advantages   .87 -.87 -.87 .87 | 0 0 0 0, by GRPO             `split_updates`
        pack         4 samples a rank, in micro-batches               `pack`
        policy step  pi_old against mu, gradients, one update         `check_logprobs`, `update`
    With 1 step ahead, prompts and rollout of step 4 run beside the policy step of step 3.
    """

    def __init__(
        self,
        job: StageJob,
        settings: TrainingBlocks,
        rollout: RolloutSettings,
        domains: Mapping[str, DomainSettings],
        updates: int,
        entropies: bool = False,
    ) -> None:
        """Start the stage's engines and rewards; the policy will learn from `updates` updates.

        With `entropies`, every micro-batch gets the entropies of pi_old.
        """
        self.job, self.domains = job, domains
        self.sampling, self.rollout, self.loop = settings.sampling, rollout, settings.loop
        routing, model = settings.routing, job.settings.model
        self.policy = TrainedPolicy(
            model, job.settings.layout, settings.optimizer, updates, routing
        )
        self.routing = routing
        self.replay = routing.replay == "r3"
        self.entropies = entropies
        # Whether pi_old, where it is the policy itself, may come from the pass with the gradients.
        self.one_pass = not entropies
        self.bounds = bounds_of(model, job.settings.engine)
        # Where a step's samples are of older weights, only probes can show a wrong weight sync.
        self.probes = rollout.max_steps_ahead > 0 or rollout.oversampling > 1
        log = rollout_log(job, self.sampling, rollout) if is_main() else None
        self.engines = StageEngines(job, self.policy, domains, log)
        self._buffer: PromptBuffer | None = None
        self._prefetcher: Prefetcher | None = None
        if is_main():
            self._buffer = PromptBuffer(job, domains, self.sampling, self.engines)
            self._prefetcher = Prefetcher(
                self._buffer, rollout, self.loop.steps, self.is_uninformative
            )
        self._batch: Batch | None = None  # of the present step; main rank only
        self._seconds: dict[str, float] = {}
        self._version = 0  # of the weights that the present step starts with; 0 before the first

    def step(self, step: int) -> dict[str, float]:
        """Train on one step's samples; return the step's metrics. Collective.

        Raises MismatchError when engine and trainer disagree in both attempts.
        """
        self._start(step)
        attempt, attempts = 0, ATTEMPTS
        while True:
            try:
                return self._step(step, attempt)
            except MismatchError:
                if self.probes:  # they have tried twice
                    raise
                # Samples from the log do not test this weight sync: the attempt does not count.
                attempts += self.engines.forget_log(step)
                attempt += 1
                if attempt == attempts:
                    raise

    def _step(self, step: int, attempt: int) -> dict[str, float]:
        if self.rollout.collects_before_sync:  # no response has tokens of two versions
            collected, synced = self.collect(step, attempt), self.sync_weights(step)
        else:
            synced, collected = self.sync_weights(step), self.collect(step, attempt)
        samples = self.assign_advantages(collected, step)
        if self._prefetcher is not None:
            self._prefetcher.prefetch(step)  # to be sampled while this step trains
        # On shared devices the engines' turn ends before the trainer's begins.
        self.engines.sleep()
        with self._timed("seconds_train"):
            updates = [
                Update(update_samples, self.pack(update_samples))
                for update_samples in samples.updates
            ]
            checked = self.check_logprobs(updates)
            self.finish_advantages(updates)
            # Before the updates, which move the schedule on.
            rate = self.policy.learning_rate
            trained = mean_of_updates([self.update(update) for update in updates])
        observed = [(update.samples, update.batches) for update in updates]
        collect_observed(observed, self.job.settings.logging.tokens)
        routed: dict[str, float] = {}
        if is_main():
            with phase("record"):
                routed = self.engines.record(samples.updates, step)
        seconds = {**self._seconds, **self.engines.turn_seconds(), **self.engines.events()}
        efficiency = token_efficiency(
            [micro_batch for update in updates for micro_batch in update.batches]
        )
        measured = {**samples.metrics, **synced, **checked, **trained, "learning_rate": rate}
        return {**measured, **routed, **efficiency, **broadcast(seconds)}

    def sync_weights(self, step: int) -> dict[str, float]:
        """Send the policy's weights to the engines, and probe them if need be. Collective.

        Probes are continuations of half a prompt, whose log-probabilities are compared with the
        trainer's.
        """
        for attempt in range(ATTEMPTS):
            with self._timed("seconds_refit"):
                synced = self.engines.sync_weights(step)
            if not self.probes:
                return synced
            with self._timed("seconds_rollout"):
                groups: list[Group] = []
                if self._buffer is not None:
                    count = PROBES_PER_ENGINE * len(self.engines.fleet.live())
                    purpose = f"probe {step}, attempt {attempt}"
                    groups = self._buffer.probes(count, purpose, PROBE_TOKENS)
                samples = self.engines.wait_for(groups, step)
            with self._timed("seconds_train"):
                micro_batches = self._split(samples)
                mismatch = measure_mismatch(self.policy, micro_batches, self.sampling.temperature)
            exceeded = self.bounds.exceeded(mismatch.metrics, mismatch.tokens)
            if not exceeded:
                return {**synced, **mismatch.metrics}
        raise MismatchError(exceeded)

    def collect(self, step: int, attempt: int = 0) -> Batch | None:
        """Return the step's graded groups on the main rank: prompts, rollouts, rewards. Collective.

        A later `attempt` samples the prompts of the attempt before again.
        """
        # As in the first step of a stage that collects before it syncs weights.
        if self.engines.version is None:
            with self._timed("seconds_refit"):
                self.engines.sync_weights(step)
        prefetcher = self._prefetcher

        def ready() -> bool | None:
            assert prefetcher is not None
            self._batch = prefetcher.collect()
            return None if self._batch is None else True

        with self._timed("seconds_rollout"):
            if prefetcher is not None and attempt:
                assert self._batch is not None
                prefetcher.restart(step, self._batch.groups, attempt)
            elif prefetcher is not None:
                prefetcher.start(step)
            with self._timed("seconds_wait"):
                self.engines.wait(ready, step)
        return self._batch

    def assign_advantages(self, collected: Batch | None, step: int) -> StepSamples:
        """Return, on every rank, the step's samples with their advantages. Collective.

        A rank other than the main one receives only its data-parallel rank's samples whole: routes
        alone are hundreds of bytes a token.
        """
        samples: StepSamples | None = None
        if collected is not None and self._buffer is not None:
            samples = self.split_updates(collected)
            vocabulary, most = self.job.settings.model.vocabulary_size, self.rollout.staleness_bound
            samples.metrics |= batch_metrics(collected, step, self.sampling, vocabulary, most)
            samples.metrics |= self._buffer.metrics()
        return self._distribute(samples)

    def packed_together(self, samples: list[Sample]) -> list[tuple[str, list[Sample]]]:
        """Return the samples of an update that may share micro-batches, each with its `domain`."""
        return [("", samples)]

    def _distribute(self, samples: StepSamples | None) -> StepSamples:
        """Return the main rank's samples, with outlines of those that this rank does not train."""
        here = RankPlace.here()

        def share(data_rank: int) -> StepSamples:
            assert samples is not None
            updates = [
                self._share(update_samples, here.data, data_rank)
                for update_samples in samples.updates
            ]
            return StepSamples(updates, samples.metrics)

        rank_samples = scatter(share, here.data_rank)
        return rank_samples if samples is None else samples

    def _share(self, samples: list[Sample], data: int, data_rank: int) -> list[Sample]:
        """Return an update's samples, of which those of other data-parallel ranks are outlines."""
        rank_sample_ids = {
            id(sample)
            for _, together in self.packed_together(samples)
            for sample in batch.deal(together, data)[data_rank]
        }
        return [sample if id(sample) in rank_sample_ids else sample.outline() for sample in samples]

    def pack(self, samples: list[Sample]) -> list[MicroBatch]:
        """Return this rank's micro-batches of one update."""
        return [
            replace(
                micro_batch,
                domain=domain,
                demonstrated=any(sample.demonstrated for sample in together),
            )
            for domain, together in self.packed_together(samples)
            for micro_batch in self._split(together)
        ]

    def check_logprobs(self, updates: Sequence[Update]) -> dict[str, float]:
        """Compare the policy's log-probabilities, pi_old, with the engine's, mu. Collective.

        Raises MismatchError when samples of the present weights differ by more than the bound.
        """
        if self.one_pass and len(updates) == 1 and self.trains_policy():
            return {}  # `update` compares
        micro_batches = [micro_batch for update in updates for micro_batch in update.batches]
        temperature = self.sampling.temperature
        differences = measure_mismatch(self.policy, micro_batches, temperature, self.entropies)
        for micro_batch in micro_batches:
            micro_batch.weights = self._weights(micro_batch)
        for update in updates:
            update.checked = True
        return self._accept(differences)

    def update(self, update: Update) -> dict[str, float]:
        """Take one optimizer step of the policy; return its metrics. Collective."""
        # The only update of a step starts from pi_old: the forward pass of its gradients gives
        # pi_old's log-probabilities too, which saves `check_logprobs` a pass of its own. No weight
        # has changed yet when they differ from the engine's by too much.
        if not update.checked:
            self.policy.agreement.start()
        measured = self.gradients(update.samples, update.batches)
        checked = {} if update.checked else self._accept(compare(self.policy, update.batches))
        routing = self.policy.routing_metrics()
        norm = self.policy.step()
        learned = self.after_update(measured)
        return {**checked, **measured, **routing, **learned, "gradient_norm": norm}

    @abstractmethod
    def split_updates(self, batch: Batch) -> StepSamples:
        """Return each update's samples with advantages, and metrics of them. Main rank only."""

    @abstractmethod
    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Accumulate one update's gradients over `batches`, this rank's share of `samples`.

        Calls `remember` with the policy's log-probabilities. Returns the metrics. Collective.
        """

    @abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """Return how good the policy of a step is, by the step's metrics; higher is better."""

    def correction(self, micro_batch: MicroBatch) -> CorrectionSettings:
        """Return how samples that pi_old did not draw are weighed; here not at all."""
        return NoCorrectionSettings()

    def is_uninformative(self, group: Group) -> bool:
        """Return whether dynamic sampling replaces a group, which has nothing to learn from."""
        return group.zero_variance

    def trains_policy(self) -> bool:
        """Return whether the present step updates the policy."""
        return True

    def finish_advantages(self, updates: Sequence[Update]) -> None:  # noqa: B027
        """Compute what advantages need a model for, in the micro-batches. Collective."""

    def after_update(self, measured: dict[str, float]) -> dict[str, float]:
        """Update what follows the policy; return its metrics. Collective."""
        return {}

    def remember(self, responses: Responses, logprobs: torch.Tensor) -> None:
        """Keep the policy's log-probabilities as pi_old unless a pass before the update did.

        Also what is recorded of tokens.
        """
        micro_batch = responses.batch
        if micro_batch.old_logprobs is None:
            micro_batch.old_logprobs = logprobs.detach()
            micro_batch.weights = self._weights(micro_batch)
        observe(responses, self.sampling.temperature, self.job.settings.logging.tokens)

    def stale(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return which responses [B, 1] have tokens of older weights; bool."""
        stale = [sample.weight_version < self._version for sample in micro_batch.samples]
        return torch.tensor(stale, device=micro_batch.mask.device).unsqueeze(-1)

    def state(self) -> dict[str, Any]:
        """Return the state of the prompts. That of the main rank is saved."""
        return self._buffer.state() if self._buffer else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the prompts from a saved state."""
        if self._buffer:
            self._buffer.restore(state)

    def close(self) -> None:
        """Leave the engines and stop the rewards."""
        self.engines.drop_covered_log()
        self.engines.close()

    def _start(self, step: int) -> None:
        if not self._version and self.engines.log is not None:
            # Steps that train only on samples of their own weights repeat when resumed.
            self.engines.log.begin(step, later=not self.probes)
        self._seconds, self._version = {}, step
        self.engines.drop_covered_log()

    def _accept(self, differences: Mismatch) -> dict[str, float]:
        if self.probes:  # older weights drew the samples: the policy's drift, and no mismatch
            metrics = differences.metrics.items()
            return {f"drift_{name.removeprefix('mismatch_')}": value for name, value in metrics}
        if exceeded := self.bounds.exceeded(differences.metrics, differences.tokens):
            raise MismatchError(exceeded)
        if self.engines.log is not None:
            self.engines.log.end(self._version)
        return differences.metrics

    def _split(self, samples: list[Sample]) -> list[MicroBatch]:
        # Demonstrations have no routes to replay.
        replay = self.replay and not any(sample.demonstrated for sample in samples)
        return batch.split(samples, RankPlace.here(), self.loop.micro_batch_tokens, replay)

    def _weights(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """Return the factors [B, R] of the tokens' surrogates; None where nothing is corrected."""
        correction = self.correction(micro_batch)
        if micro_batch.old_logprobs is None or correction.name == "none":
            return None
        weights = correction_weights(
            micro_batch.old_logprobs, micro_batch.engine_logprobs, micro_batch.mask, correction
        )
        precision = self.job.settings.model.precision
        if correction.applies_to_all(self.routing.replay, precision):
            return weights
        return weights.where(self.stale(micro_batch), 1.0)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to the metric `name`, in seconds."""
        start = time.perf_counter()
        with phase(PHASES[name]):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
