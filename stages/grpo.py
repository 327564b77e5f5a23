"""The training of a policy on the rewards of one domain or several: GRPO, its variants, or PPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from parallel.batch import MicroBatch, Responses
from parallel.distributed import sum_over_data
from parallel.sample import Sample
from stages.guards.measures import graded, group_metrics, is_right
from stages.guards.watch import GuardMonitor
from stages.kinds.grpo import GrpoSettings
from stages.loop import train
from stages.metrics import reduce_sums
from stages.objectives.groups import (
    Batch,
    Group,
    LengthWeights,
    has_zero_advantages,
    scale_by_entropy,
)
from stages.objectives.kl import kl_controller
from stages.objectives.loss import MetricSum, Totals, policy_loss
from stages.objectives.models import Reference, baseline_of
from stages.objectives.surrogate import Tokens
from stages.sampling.step import OnPolicyStage, StepSamples, Update
from stages.settings import StageJob


def run(job: StageJob) -> None:
    """Train on the rewards of `job.domains` to the stage's last step."""
    stage = Expert(job)
    train(stage, job, stage.loop, stage.watch)
    stage.close()


class Expert(OnPolicyStage):
    """The stage that trains on rewards: of a domain, or of several at once.

    Its baseline is what rewards are compared with: other samples of the group, or a critic.
    """

    def __init__(self, job: StageJob) -> None:
        settings = job.policy
        self.objective = objective = settings.objective
        self.updates_per_rollout = settings.updates_per_rollout
        steps = settings.loop.steps - objective.advantage.warmup_steps
        super().__init__(
            job,
            settings,
            settings.rollout,
            job.own_domains,
            steps * settings.updates_per_rollout,
            objective.correction,
            entropies=objective.needs_entropies,
        )
        self.rewards = {name: domain.rewards for name, domain in self.domains.items()}
        self.reward_weights = {
            name: {part: reward.weight for part, reward in rewards.items()}
            for name, rewards in self.rewards.items()
        }
        of_all = next(iter(self.rewards.values())) if len(self.rewards) == 1 else {}
        assert isinstance(job.own, GrpoSettings)
        at = job.own.keys(f"stages.{job.block}", job.domains)
        self.watch = GuardMonitor(job.stage, at, settings, of_all)
        self.kl_coefficient = objective.kl.coefficient
        self.length_exponent = 0.0  # lambda
        self.length_weights: LengthWeights | None = None  # of the current update
        if objective.ratio.needs_router_shift:
            self.policy.remember_routing()
            self.one_pass = False  # a pass before the update records the routers' scores
        self.reference = Reference(job, self.policy, objective.kl) if self.kl_coefficient else None
        self.baseline = baseline_of(job, self.policy)

    def split_updates(self, batch: Batch) -> StepSamples:
        """Deal the groups to `updates_per_rollout` updates; assign advantages to graded samples."""
        samples: list[list[Sample]] = []
        for name, weights in self.reward_weights.items():  # advantages are computed per domain
            own = [group for group in batch.groups if group.problem.domain == name]
            samples += self.baseline.assign(own, weights, len(samples))
        if self.objective.mask_truncated:
            for sample in (sample for group in samples for sample in group if not sample.finished):
                sample.loss_mask = np.zeros(len(sample.response), bool)
        updates = self.updates_per_rollout
        return StepSamples(
            updates=[
                [sample for group in samples[update::updates] for sample in group]
                for update in range(updates)
            ],
            metrics={
                **group_metrics(batch.sampled, self.rewards),
                "resampled_groups": float(len(batch.replaced)),
                **self.baseline.metrics(map(self._has_zero_advantages, batch.sampled)),
            },
        )

    def is_useless(self, group: Group) -> bool:
        """Return whether dynamic sampling replaces a group, by `rollout.dynamic_sampling_by`."""
        if self.rollout.dynamic_sampling_by == "advantages":
            return self._has_zero_advantages(group)
        rewards = self.rewards[group.problem.domain]
        return len({is_right(sample, rewards) for sample in graded(group)}) <= 1

    def finish_advantages(self, updates: Sequence[Update]) -> None:
        """Compute a critic's advantages, or scale advantages by entropy. Collective."""
        samples = [sample for each in updates for sample in each.samples]
        parts = [part for each in updates for part in each.batches]
        self.baseline.compute_values(samples, parts)
        if self.objective.needs_entropies:
            scale_by_entropy(samples, parts)

    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Accumulate the objective's gradients of one update; return its metrics. Collective."""
        if self.reference is not None:
            self.reference.compute_logprobs(batches, self.sampling.temperature)
        if self.objective.ratio.needs_router_shift:
            movements = self.policy.router_movement(batches)
            for part, movement in zip(batches, movements, strict=False):
                part.router_movement = movement
        learned = [len(sample.learned) for sample in samples]
        totals = Totals(
            sequences=len(samples),
            tokens=sum(learned),
            longest=self.sampling.max_response_tokens,
            learned=sum(map(bool, learned)),
        )
        self.length_weights = length_weights = LengthWeights(samples, self.length_exponent)

        def loss(
            responses: Responses,
        ) -> tuple[torch.Tensor, tuple[float, dict[str, MetricSum]]]:
            tokens = self._tokens(responses, length_weights)
            result = policy_loss(tokens, totals, self.objective, self.kl_coefficient)
            return result.loss, (result.loss.item(), result.metrics)

        parts = self.policy.accumulate(batches, loss, sum(sample.length for sample in samples))
        # Without a learned token there is no ratio, entropy or KL to report.
        shares = reduce_sums([metrics for _, metrics in parts], totals) if totals.tokens else {}
        shares["loss"] = sum(value for value, _ in parts)
        return sum_over_data(shares)

    def trains_policy(self) -> bool:
        """Return False while a critic warms up alone."""
        return not self.baseline.learns_alone(self._version)

    def update(self, update: Update) -> dict[str, float]:
        """Update the policy, unless a critic warms up alone, and the critic, if any. Collective."""
        trained = super().update(update) if self.trains_policy() else {}
        return {**trained, **self.baseline.learn(update.samples, update.batches)}

    def after_update(self, measured: dict[str, float]) -> dict[str, float]:
        """Update the EMA, the KL coefficient and lambda; return the values of this update."""
        logged = {}
        if self.reference is not None:
            self.reference.update_ema()
        if (target := self.objective.kl.target) is not None:
            logged["kl_coefficient"] = self.kl_coefficient
            if "kl" in measured:
                self.kl_coefficient = kl_controller(self.kl_coefficient, measured["kl"], target)
        if self.objective.learns_length_weights:
            assert self.length_weights is not None
            logged["length_exponent"] = self.length_exponent
            gradient = self.length_weights.gradient()
            self.length_exponent -= self.objective.lambda_learning_rate * gradient
        return logged

    def score(self, metrics: dict[str, float]) -> float:
        """Return the mean reward."""
        return metrics["reward"]

    def state(self) -> dict[str, Any]:
        """Return the state of the prompts, the objective's coefficients and the guards."""
        learned = {
            "kl_coefficient": self.kl_coefficient,
            "length_exponent": self.length_exponent,
            "watch": self.watch.state(),
        }
        return {**super().state(), **learned}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        super().restore(state)
        self.kl_coefficient = state["kl_coefficient"]
        self.length_exponent = state["length_exponent"]
        self.watch.restore(state["watch"])

    def _has_zero_advantages(self, group: Group) -> bool:
        weights, masked = self.reward_weights[group.problem.domain], self.objective.mask_truncated
        return has_zero_advantages(group, self.objective.advantage, weights, masked)

    def _sampling_logprobs(self, part: MicroBatch) -> torch.Tensor | None:
        """Return log-probabilities [B, R] of the sampling policy, if the KL estimator needs them.

        They are the engine's (mu) for responses with tokens of older weights, else pi_old's.
        """
        if not self.objective.kl.needs_sampling_logprobs or part.old_logprobs is None:
            return None
        return part.engine_logprobs.where(self.stale(part), part.old_logprobs)

    def _tokens(self, responses: Responses, length_weights: LengthWeights) -> Tokens:
        """Return the objective's inputs; compute only those that it needs."""
        part, temperature = responses.batch, self.sampling.temperature
        logprobs = responses.logprobs(temperature)
        self.remember(part, logprobs)
        assert part.old_logprobs is not None
        bonus = self.objective.entropy_bonus > 0
        weighs = self.objective.learns_length_weights
        return Tokens(
            logprobs=logprobs,
            old_logprobs=part.old_logprobs,
            engine_logprobs=part.engine_logprobs,
            advantages=part.advantages,
            mask=part.mask,
            sampling_logprobs=self._sampling_logprobs(part),
            weights=part.weights,
            router_movement=part.router_movement,
            reference_logprobs=part.reference_logprobs,
            reference_kl=responses.kl(part.reference, temperature) if part.reference else None,
            entropy=responses.entropy(temperature) if bonus else None,
            length_weights=length_weights.of(part) if weighs else None,
        )
