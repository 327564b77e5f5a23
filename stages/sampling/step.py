"""The step of every stage whose policy learns from its own samples, and what it consists of."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from parallel import batch
from parallel.batch import MicroBatch
from parallel.distributed import broadcast, is_main
from parallel.model.policy import TrainedPolicy
from parallel.packing import RankPlace
from parallel.sample import Sample
from stages.metrics import token_efficiency
from stages.objectives.groups import Group
from stages.objectives.surrogate import CorrectionSettings, correction_weights
from stages.sampling.collection import Batch, Prefetcher
from stages.sampling.engines import StageEngines, rollout_log
from stages.sampling.logprob_check import MismatchError, compare, measure_mismatch
from stages.sampling.prompt_buffer import PromptBuffer
from stages.sampling.sample_metrics import rollout_metrics, saturated, staleness_metrics
from stages.settings import (
    DomainSettings,
    LoopSettings,
    RolloutSettings,
    RoutingSettings,
    SamplingSettings,
    StageJob,
)

ATTEMPTS = 2
PROBES_PER_ENGINE, PROBE_TOKENS = 4, 8  # responses that show whether a weight sync is right


@dataclass
class StepSamples:
    """The samples of each update of a step, with advantages, and the metrics of its rollouts."""

    updates: list[list[Sample]]
    metrics: dict[str, float]


@dataclass
class Update:
    """The samples of one update, and this rank's micro-batches of them.

    Its log-probabilities are `checked` where a pass before the update compared them.
    """

    samples: list[Sample]
    batches: list[MicroBatch]
    checked: bool = False


class OnPolicyStage(ABC):
    """A stage whose policy learns from its own samples; a subclass is one way to learn.

    The policy's weights at the start of step v are version v.
    """

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
        """Start the stage's engines and rewards.

        `correction` weighs samples that pi_old did not draw; with `entropies`, every micro-batch
        gets the entropies of pi_old.
        """
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
        # Whether pi_old, where it is the policy itself, may come from the pass with the gradients.
        self.one_pass = not entropies
        self.bound = job.settings.engine.max_logprob_difference
        # Where a step's samples are of older weights, only probes can show a wrong weight sync.
        self.probes = settings.prefetch > 0 or settings.oversampling > 1
        log = rollout_log(job, sampling, settings) if is_main() else None
        self.engines = StageEngines(job, policy, domains, log)
        self._buffer: PromptBuffer | None = None
        self._prefetcher: Prefetcher | None = None
        if is_main():
            self._buffer = PromptBuffer(job, domains, sampling, self.engines)
            self._prefetcher = Prefetcher(self._buffer, settings, loop.steps, self.is_useless)
        self._groups: list[Group] = []  # of the present step; main rank only
        self._seconds: dict[str, float] = {}
        self._started = False
        self._version = 0  # of the weights that the present step starts with

    def step(self, step: int) -> dict[str, float]:
        """Train on one step's samples; return the step's metrics. Collective.

        Raises MismatchError when engine and trainer disagree twice. Once may be rounding: among a
        million tokens a few are so ill-conditioned that fp32 cannot resolve them. A wrong weight
        sync is wrong again.
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
        if self.settings.drains:  # no response has tokens of two versions
            batch, synced = self.collect(step, attempt), self.sync_weights(step)
        else:
            synced, batch = self.sync_weights(step), self.collect(step, attempt)
        samples = self.assign_advantages(batch, step)
        self.prefetch(step)
        with self._timed("seconds_train"):
            updates = [Update(each, self.pack(each)) for each in samples.updates]
            checked = self.check_logprobs(updates)
            self.finish_advantages(updates)
            rate = self.policy.learning_rate
            trained = _mean([self.update(each) for each in updates])
        if is_main():
            self.engines.record(samples.updates, step)
        efficiency = token_efficiency([part for each in updates for part in each.batches])
        measured = {**samples.metrics, **synced, **checked, **trained, "learning_rate": rate}
        return {**measured, **efficiency, **broadcast({**self._seconds, **self.engines.events()})}

    def sync_weights(self, step: int) -> dict[str, float]:
        """Send the policy's weights to the engines, and probe them if need be. Collective.

        Probes are short responses whose log-probabilities are compared with the trainer's.
        """
        for attempt in range(ATTEMPTS):
            with self._timed("seconds_refit"):
                synced = self.engines.sync_weights(step)
            if not self.probes:
                return synced
            with self._timed("seconds_rollout"):
                groups = self._request_probes(f"probe {step}, attempt {attempt}")
                samples = self.engines.wait_for(groups, step)
            with self._timed("seconds_train"):
                parts = OnPolicyStage.pack(self, samples)
                mismatch = measure_mismatch(self.policy, parts, self.sampling.temperature)
            if mismatch["mismatch_max"] <= self.bound:
                return {**synced, **mismatch}
        raise MismatchError(mismatch["mismatch_max"], self.bound)

    def collect(self, step: int, attempt: int = 0) -> Batch | None:
        """Return the step's graded groups on the main rank: prompts, rollouts, rewards. Collective.

        A later `attempt` samples the prompts of the attempt before again.
        """
        if self.engines.version is None:
            with self._timed("seconds_refit"):
                self.engines.sync_weights(step)
        found: list[Batch] = []

        def ready() -> bool | None:
            assert self._prefetcher is not None
            found.extend(each for each in [self._prefetcher.collect()] if each is not None)
            return True if found else None

        with self._timed("seconds_rollout"):
            if self._prefetcher is not None and attempt:
                self._prefetcher.restart(step, self._groups, attempt)
            elif self._prefetcher is not None:
                self._prefetcher.start(step)
            with self._timed("seconds_wait"):
                self.engines.wait(ready, step)
        self._groups = found[0].groups if found else []
        return found[0] if found else None

    def prefetch(self, step: int) -> None:
        """Request prompts of later steps, to be sampled while this one trains."""
        if self._prefetcher is not None:
            self._prefetcher.prefetch(step)

    def assign_advantages(self, batch: Batch | None, step: int) -> StepSamples:
        """Return, on every rank, the step's samples with their advantages. Collective."""
        samples: StepSamples | None = None
        if batch is not None:
            samples = self.split_updates(batch)
            # Replaced groups count: without them the reward would tend to one half.
            sampled = [sample for group in batch.sampled for sample in group.samples]
            trained = [sample for group in batch.groups for sample in group.samples]
            samples.metrics.update(
                **rollout_metrics(sampled),
                **saturated(trained, self.sampling, self.job.settings.model.vocabulary_size),
                **staleness_metrics(trained, step, self.settings.max_staleness),
                dropped_stale=float(batch.too_old),
                reward_failures=float(batch.failures),
                watch_failures=float(batch.watch_failures),
                too_long=self.buffer.too_long(),
            )
        return broadcast(samples)

    def pack(self, samples: list[Sample]) -> list[MicroBatch]:
        """Return this rank's micro-batches of one update."""
        budget = self.loop.micro_batch_tokens
        return batch.split(samples, RankPlace.here(), budget, self.replay)

    def check_logprobs(self, updates: Sequence[Update]) -> dict[str, float]:
        """Compare the policy's log-probabilities, pi_old, with the engine's, mu. Collective.

        Raises MismatchError when samples of the present weights differ by more than the bound.
        """
        if self.one_pass and len(updates) == 1 and self.trains_policy():
            return {}  # `update` compares
        parts = [part for each in updates for part in each.batches]
        temperature = self.sampling.temperature
        differences = measure_mismatch(self.policy, parts, temperature, self.entropies)
        for part in parts:
            part.weights = self._weights(part)
        for each in updates:
            each.checked = True
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

    @property
    def buffer(self) -> PromptBuffer:
        """The main rank's prompt buffer."""
        assert self._buffer is not None, "only the main rank has prompts"
        return self._buffer

    @abstractmethod
    def split_updates(self, batch: Batch) -> StepSamples:
        """Return the samples of each update with advantages, and this stage's metrics of them.

        Main rank only.
        """

    @abstractmethod
    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Accumulate one update's gradients over `batches`, this rank's share of `samples`.

        Calls `remember` with the policy's log-probabilities. Returns the metrics. Collective.
        """

    @abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """Return how good the policy of a step is, by the step's metrics; higher is better."""

    def is_useless(self, group: Group) -> bool:
        """Return whether dynamic sampling replaces a group, which has nothing to learn from."""
        return group.zero_variance

    def trains_policy(self) -> bool:
        """Return whether the present step updates the policy."""
        return True

    def finish_advantages(self, updates: Sequence[Update]) -> None:  # noqa: B027
        """Compute what advantages need a model for, in the micro-batches. Collective."""

    def after_update(self, measured: dict[str, float]) -> dict[str, float]:
        """Update what follows the policy after an update that `measured`; return its metrics.

        Collective.
        """
        return {}

    def remember(self, part: MicroBatch, log_probs: torch.Tensor) -> None:
        """Keep the policy's log-probabilities as pi_old unless a pass before the update did."""
        if part.old_logprobs is None:
            part.old_logprobs = log_probs.detach()
            part.weights = self._weights(part)

    def stale(self, part: MicroBatch) -> torch.Tensor:
        """Return which responses [B, 1] have tokens of older weights; bool."""
        stale = [sample.weight_version < self._version for sample in part.samples]
        return torch.tensor(stale, device=part.mask.device).unsqueeze(-1)

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
        self._seconds, self._version = {}, step
        if not self._started:
            # Steps that train only on samples of their own weights repeat when resumed.
            self.engines.start_log(step, later=not self.probes)
        self._started = True
        self.engines.drop_covered_log()

    def _request_probes(self, purpose: str) -> list[Group]:
        if self._buffer is None:
            return []
        count = PROBES_PER_ENGINE * len(self.engines.fleet.live())
        return self._buffer.probes(count, purpose, PROBE_TOKENS)

    def _accept(self, differences: dict[str, float]) -> dict[str, float]:
        if self.probes:  # older weights drew the samples: the policy's drift, and no mismatch
            named = differences.items()
            return {f"drift_{name.removeprefix('mismatch_')}": value for name, value in named}
        if not differences["mismatch_max"] <= self.bound:
            raise MismatchError(differences["mismatch_max"], self.bound)
        self.engines.end_log(self._version)
        return differences

    def _weights(self, part: MicroBatch) -> torch.Tensor | None:
        """Return the factors [B, R] of the tokens' surrogates; None where nothing is corrected."""
        if part.old_logprobs is None or self.correction.name == "none":
            return None
        found = correction_weights(
            part.old_logprobs, part.engine_logprobs, part.mask, self.correction
        )
        return found if self.correct_all else found.where(self.stale(part), 1.0)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to the metric `name`, in seconds."""
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start


def _mean(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the updates that have it."""
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values.setdefault(name, []).append(value)
    return {name: sum(of) / len(of) for name, of in values.items()}
