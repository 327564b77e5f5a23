"""One domain's expert: group-relative policy optimisation on verified rewards."""

from __future__ import annotations

import torch

from parallel import checkpoints
from parallel.batch import MicroBatch
from parallel.distributed import sum_over_data
from parallel.policy import Policy, TrainedPolicy
from parallel.responses import Responses
from parallel.sample import Sample
from stages.backlog import Batch
from stages.groups import Group
from stages.loop import train
from stages.metrics import reduce_sums
from stages.objectives.advantages import group_advantages, zero_variance
from stages.objectives.aggregation import Totals
from stages.objectives.policy_loss import MetricSum, policy_loss
from stages.on_policy import OnPolicyStage, Rollout
from stages.settings import StageJob


def run(job: StageJob) -> None:
    """Train the expert of `job.domain` to its last step."""
    stage = Expert(job)
    train(stage, job, stage.loop)
    stage.close()


class Expert(OnPolicyStage):
    """prompts -> rollout -> rewards -> advantages -> micro-batches -> policy step -> refit."""

    def __init__(self, job: StageJob) -> None:
        assert job.domain is not None and job.parent is not None
        self.expert = settings = job.settings.experts[job.domain]
        updates = settings.loop.steps * settings.updates_per_rollout
        policy = TrainedPolicy(
            job.settings.model, job.settings.layout, settings.optimizer, updates, settings.routing
        )
        super().__init__(
            job,
            policy,
            {job.domain: settings},
            settings.sampling,
            settings.rollout,
            settings.routing,
            settings.loop,
        )
        self.references: dict[str, Policy] = {}
        if settings.objective.kl.coefficient > 0:
            self.references = {"parent": Policy(job.settings.model, job.settings.layout)}
            checkpoints.load_weights(self.references["parent"], job.parent)

    def share_out(self, batch: Batch) -> Rollout:
        """`updates_per_rollout` shares of the prompts, each with all samples of its groups."""
        rewards = _rewards(batch.groups)
        advantages = group_advantages(rewards, self.expert.objective.advantage)
        for group, values in zip(batch.groups, advantages.tolist(), strict=True):
            for sample, advantage in zip(group.samples, values, strict=True):
                sample.advantage = advantage
        updates = self.expert.updates_per_rollout
        drawn = _rewards([*batch.groups, *batch.replaced])
        return Rollout(
            updates=[
                [sample for group in batch.groups[update::updates] for sample in group.samples]
                for update in range(updates)
            ],
            metrics={
                "zero_variance": zero_variance(drawn).float().mean().item(),
                "resampled_groups": float(len(batch.replaced)),
            },
        )

    def update(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """One step on the objective of the domain."""
        if self.expert.objective.kl.coefficient > 0:
            self._add_reference_logprobs(batches)
        totals = Totals(len(samples), sum(len(sample.response) for sample in samples))

        def loss(
            responses: Responses,
        ) -> tuple[torch.Tensor, tuple[float, dict[str, MetricSum]]]:
            part = responses.batch
            assert part.old_logprobs is not None
            result = policy_loss(
                responses.log_probs(self.sampling.temperature),
                part.old_logprobs,
                part.advantages,
                part.mask,
                totals,
                self.expert.objective,
                part.reference_logprobs,
                part.importance,
            )
            return result.loss, (result.loss.item(), result.metrics)

        read = sum(sample.length for sample in samples)
        parts = self.policy.accumulate(batches, loss, read)
        norm = self.policy.step()
        shares = reduce_sums([metrics for _, metrics in parts], totals)
        shares["loss"] = sum(value for value, _ in parts)
        return {
            **sum_over_data(shares),
            **self.policy.routing_metrics(),
            "gradient_norm": norm,
        }

    def score(self, metrics: dict[str, float]) -> float:
        """A high reward is good."""
        return metrics["reward"]

    def _add_reference_logprobs(self, batches: list[MicroBatch]) -> None:
        """The reference routes by itself: it is another model than the one that sampled."""
        reference = self.references[self.expert.objective.kl.reference]
        own_routing = [part.without_routes() for part in batches]
        logprobs = reference.target_logprobs(own_routing, self.sampling.temperature)
        for part, values in zip(batches, logprobs, strict=False):  # none but on the last stage
            part.reference_logprobs = values


def _rewards(groups: list[Group]) -> torch.Tensor:
    """[groups, samples of each]."""
    return torch.tensor([[sample.reward for sample in group.samples] for group in groups])
