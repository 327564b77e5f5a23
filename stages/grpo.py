"""One domain's expert: group-relative policy optimisation on verified rewards."""

from __future__ import annotations

import torch

from parallel import checkpoints
from parallel.batch import MicroBatch
from parallel.distributed import is_main, sum_over_data
from parallel.policy import Policy, TrainedPolicy
from parallel.responses import Responses
from parallel.sample import Sample
from stages.domains.prompts import PromptStream
from stages.domains.rewards import load_reward
from stages.loop import train
from stages.metrics import reduce_sums
from stages.objectives.advantages import group_advantages, zero_variance
from stages.objectives.aggregation import Totals
from stages.objectives.policy_loss import MetricSum, policy_loss
from stages.on_policy import OnPolicyStage, Rollout, rollout_metrics
from stages.settings import StageJob


def run(job: StageJob) -> None:
    """Train the expert of `job.domain` to its last step."""
    stage = Expert(job)
    train(stage, job, stage.loop)


class Expert(OnPolicyStage):
    """prompts -> rollout -> rewards -> advantages -> micro-batches -> policy step -> refit."""

    def __init__(self, job: StageJob) -> None:
        assert job.domain is not None and job.parent is not None
        self.domain = job.domain
        self.settings = settings = job.settings.experts[job.domain]
        updates = settings.loop.steps * settings.updates_per_rollout
        policy = TrainedPolicy(
            job.settings.model, job.settings.layout, settings.optimizer, updates, settings.routing
        )
        super().__init__(job, policy, settings.sampling, settings.routing, settings.loop)
        self.references: dict[str, Policy] = {}
        if settings.objective.kl.coefficient > 0:
            self.references = {"parent": Policy(job.settings.model, job.settings.layout)}
            checkpoints.load_weights(self.references["parent"], job.parent)
        if is_main():
            self.reward = load_reward(self.domain, settings.reward)

    def roll_out(self, purpose: str) -> Rollout:
        """`updates_per_rollout` shares of the prompts, each with all samples of its groups."""
        prompts = PromptStream(
            self.settings.prompts,
            self.domain,
            self.job.settings.seed,
            self.job.stage,
            cursor=self.cursors.get(self.domain, 0),
        )
        problems = prompts.take(self.sampling.prompts_per_step)
        samples = self.rollouts.sample(self.domain, problems, self.sampling, purpose)
        self.rollouts.grade(samples, problems, self.reward)
        rewards = torch.tensor([sample.reward for sample in samples]).view(len(problems), -1)
        advantages = group_advantages(rewards, self.settings.objective.advantage).flatten()
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            sample.advantage = advantage
        updates, group = self.settings.updates_per_rollout, self.sampling.group_size
        return Rollout(
            updates=[
                [sample for i, sample in enumerate(samples) if (i // group) % updates == update]
                for update in range(updates)
            ],
            cursors={self.domain: prompts.cursor},
            metrics={
                **rollout_metrics(samples),
                "zero_variance": zero_variance(rewards).float().mean().item(),
            },
        )

    def update(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """One step on the objective of the domain."""
        if self.settings.objective.kl.coefficient > 0:
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
                self.settings.objective,
                part.reference_logprobs,
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
        reference = self.references[self.settings.objective.kl.reference]
        own_routing = [part.without_routes() for part in batches]
        logprobs = reference.target_logprobs(own_routing, self.sampling.temperature)
        for part, values in zip(batches, logprobs, strict=False):  # none but on the last stage
            part.reference_logprobs = values
