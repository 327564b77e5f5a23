"""The training of a policy on the rewards of one domain or several: GRPO, its variants, or PPO."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from parallel.batch import MicroBatch, Responses
from parallel.distributed import sum_over_data
from parallel.sample import Sample
from stages.guards.watch import GuardMonitor
from stages.kinds.grpo.settings import GrpoSettings
from stages.loop import train
from stages.metrics import group_metrics, reduce_sums
from stages.objectives.domain_objective import DomainObjective, StageObjectives
from stages.objectives.groups import (
    Batch,
    Group,
    has_zero_advantages,
    is_right,
    rewarded,
    taught_nothing,
)
from stages.objectives.loss import MetricSum, Totals, policy_loss
from stages.objectives.surrogate import CorrectionSettings, Tokens
from stages.sampling.step import OnPolicyStage, StepSamples, Update
from stages.settings import StageJob

DomainSums = tuple[tuple[str, ...], dict[str, MetricSum]]  # of a micro-batch that may hold domains


def run(job: StageJob) -> None:
    """Train on the rewards of `job.domains` to the stage's last step."""
    stage = GrpoStage(job)
    train(stage, job, stage.loop, stage.watch)
    stage.close()


class GrpoStage(OnPolicyStage):
    """The stage that trains on rewards: of a domain, or of several at once.

    Its baseline is what rewards are compared with: other samples of the group, or a critic.
    """

    def __init__(self, job: StageJob) -> None:
        grpo, settings = job.block_settings, job.policy
        assert isinstance(grpo, GrpoSettings)
        objectives = grpo.objectives(job.settings, job.domains)
        self.updates_per_rollout = settings.updates_per_rollout
        warmup = max(objective.advantage.warmup_steps for objective in objectives.values())
        super().__init__(
            job,
            settings,
            settings.rollout,
            job.own_domains,
            (settings.loop.steps - warmup) * settings.updates_per_rollout,
            entropies=any(objective.needs_entropies for objective in objectives.values()),
        )
        self.rewards = {name: domain.rewards for name, domain in self.domains.items()}
        self.reward_weights = {
            name: {reward_name: reward.weight for reward_name, reward in rewards.items()}
            for name, rewards in self.rewards.items()
        }
        of_all = next(iter(self.rewards.values())) if len(self.rewards) == 1 else {}
        at = grpo.keys(f"stages.{job.block}", job.domains)
        self.watch = GuardMonitor(job.stage, at, settings, of_all)
        if any(objective.ratio.needs_router_shift for objective in objectives.values()):
            self.policy.remember_routing()
            self.one_pass = False  # a pass before the update records the routers' scores
        self.objectives = StageObjectives(job, self.policy, objectives)

    def split_updates(self, batch: Batch) -> StepSamples:
        """Deal the groups to `updates_per_rollout` updates; assign advantages to graded samples."""
        samples: list[list[Sample]] = []
        for name, weights in self.reward_weights.items():  # advantages are computed per domain
            domain_groups = [group for group in batch.groups if group.problem.domain == name]
            samples += self.objectives.of(name).baseline.assign(
                domain_groups, weights, len(samples)
            )
        for sample in (sample for group in samples for sample in group if not sample.finished):
            if self.objectives.of(sample.domain).settings.mask_truncated:
                sample.loss_mask = np.zeros(len(sample.response), bool)
        updates = self.updates_per_rollout
        return StepSamples(
            # In turn, since groups are ordered by domain: every update has some of each.
            updates=[
                [sample for group in samples[update::updates] for sample in group]
                for update in range(updates)
            ],
            metrics={
                **group_metrics(batch.sampled, self.rewards),
                "resampled_groups": float(len(batch.replaced)),
                # A critic's objective is a stage's only one.
                **next(iter(self.objectives)).baseline.metrics(
                    chain(
                        map(taught_nothing, batch.groups),
                        map(self._has_zero_advantages, batch.replaced),
                    )
                ),
            },
        )

    def is_uninformative(self, group: Group) -> bool:
        """Return whether dynamic sampling replaces a group, by `rollout.dynamic_sampling_by`."""
        if self.rollout.dynamic_sampling_by == "advantages":
            return self._has_zero_advantages(group)
        rewards = self.rewards[group.problem.domain]
        return len({is_right(sample, rewards) for sample in rewarded(group)}) <= 1

    def packed_together(self, samples: list[Sample]) -> list[tuple[str, list[Sample]]]:
        """Return the samples of each objective."""
        return [*self.objectives.packed_together(samples).items()]

    def correction(self, micro_batch: MicroBatch) -> CorrectionSettings:
        """Return how the micro-batch's objective weighs samples that pi_old did not draw."""
        return self.objectives.of(micro_batch.domain).settings.correction

    def finish_advantages(self, updates: Sequence[Update]) -> None:
        """Compute a critic's advantages, or scale advantages by entropy. Collective."""
        samples = [sample for update in updates for sample in update.samples]
        micro_batches = [micro_batch for update in updates for micro_batch in update.batches]
        for objective in self.objectives:
            objective.finish_advantages(samples, micro_batches)

    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Accumulate the objectives' gradients of one update; return its metrics. Collective."""
        for objective in self.objectives:
            objective.start_update(self.policy, samples, batches, self.sampling.temperature)
        by_domain = self.objectives.totals(samples, self.sampling.max_response_tokens)
        totals = Totals.together(by_domain.values())

        def loss(responses: Responses) -> tuple[torch.Tensor, tuple[float, list[DomainSums]]]:
            micro_batch = responses.batch
            objective = self.objectives.of(micro_batch.domain)
            tokens = self._tokens(responses, objective)
            result = policy_loss(tokens, totals, objective.settings, objective.kl_coefficient)
            sums: list[DomainSums] = [(objective.domains, result.metrics)]
            for domain, kl in objective.kl_sums(micro_batch, result.kl).items():
                sums.append(((domain,), {f"kl/{domain}": kl}))
            return result.loss, (result.loss.item(), sums)

        losses_and_sums = self.policy.accumulate(
            batches, loss, sum(sample.length for sample in samples)
        )
        shares = reduce_sums(
            [domain_sums for _, sums in losses_and_sums for domain_sums in sums], by_domain
        )
        shares["loss"] = sum(value for value, _ in losses_and_sums)
        return sum_over_data(shares)

    def trains_policy(self) -> bool:
        """Return False while a critic warms up alone."""
        return not any(
            objective.baseline.learns_alone(self._version) for objective in self.objectives
        )

    def update(self, update: Update) -> dict[str, float]:
        """Update the policy, unless a critic warms up alone, and the critic, if any. Collective."""
        trained = super().update(update) if self.trains_policy() else {}
        for objective in self.objectives:
            samples, micro_batches = objective.own(update.samples), objective.parts(update.batches)
            trained = {**trained, **objective.baseline.learn(samples, micro_batches)}
        return trained

    def after_update(self, measured: dict[str, float]) -> dict[str, float]:
        """Update averages, KL coefficients and lambdas; return the values of this update."""
        return self.objectives.after_update(measured)

    def score(self, metrics: dict[str, float]) -> float:
        """Return the mean reward."""
        return metrics["reward"]

    def state(self) -> dict[str, Any]:
        """Return the state of the prompts, what the objectives have learned, and the guards."""
        return {**super().state(), **self.objectives.state(), "watch": self.watch.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        super().restore(state)
        self.objectives.restore(state)
        self.watch.restore(state["watch"])

    def _has_zero_advantages(self, group: Group) -> bool:
        weights = self.reward_weights[group.problem.domain]
        settings = self.objectives.of(group.problem.domain).settings
        return has_zero_advantages(group, settings.advantage, weights, settings.mask_truncated)

    def _sampling_logprobs(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """Return log-probabilities [B, R] of the sampling policy, if the KL estimator needs them.

        They are the engine's (mu) for responses with tokens of older weights, else pi_old's.
        """
        needed = self.objectives.of(micro_batch.domain).settings.kl.needs_sampling_logprobs
        if not needed or micro_batch.old_logprobs is None:
            return None
        return micro_batch.engine_logprobs.where(self.stale(micro_batch), micro_batch.old_logprobs)

    def _tokens(self, responses: Responses, objective: DomainObjective) -> Tokens:
        """Return the inputs of an objective; compute only those that it needs."""
        micro_batch, temperature = responses.batch, self.sampling.temperature
        logprobs = responses.logprobs(temperature)
        self.remember(responses, logprobs)
        assert micro_batch.old_logprobs is not None
        bonus, weights = objective.settings.entropy_bonus > 0, objective.length_weights
        return Tokens(
            logprobs=logprobs,
            old_logprobs=micro_batch.old_logprobs,
            engine_logprobs=micro_batch.engine_logprobs,
            advantages=micro_batch.advantages,
            mask=micro_batch.mask,
            sampling_logprobs=self._sampling_logprobs(micro_batch),
            weights=micro_batch.weights,
            router_movement=micro_batch.router_movement,
            reference_logprobs=micro_batch.reference_logprobs,
            reference_kl=(
                responses.kept_kl(micro_batch.reference, temperature)
                if micro_batch.reference
                else None
            ),
            entropy=responses.entropy(temperature) if bonus else None,
            length_weights=weights.of(micro_batch) if weights else None,
        )
