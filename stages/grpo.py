"""One domain's expert: group-relative policy optimisation on verified rewards."""

from __future__ import annotations

from typing import Any

import torch

from parallel import batch, checkpoints, vocabulary
from parallel.batch import MicroBatch
from parallel.distributed import broadcast, is_main, sum_over_data
from parallel.policy import Policy, TrainedPolicy, data_rank
from parallel.sample import Sample
from stages.domains.prompts import PromptStream
from stages.domains.rewards import load_reward
from stages.loop import train
from stages.metrics import reduce_sums
from stages.objectives.advantages import group_advantages, zero_variance
from stages.objectives.aggregation import Totals
from stages.objectives.policy_loss import MetricSum, policy_loss
from stages.rollout import Rollouts, add_old_logprobs, stopwatch
from stages.settings import StageJob


def run(job: StageJob) -> None:
    """Train the expert of `job.domain` to its last step."""
    assert job.domain is not None
    train(Expert(job), job, job.settings.experts[job.domain].loop)


class Expert:
    """prompts -> rollout -> rewards -> advantages -> micro-batches -> policy step -> refit."""

    def __init__(self, job: StageJob) -> None:
        assert job.domain is not None and job.parent is not None
        self.job = job
        self.domain = job.domain
        self.settings = job.settings.experts[job.domain]
        self.policy = TrainedPolicy(
            job.settings.model, self.settings.optimizer, self._updates(self.settings.loop.steps)
        )
        self.rollouts = Rollouts(job)
        self.reference: Policy | None = None
        if self.settings.objective.kl.coefficient > 0:
            self.reference = Policy(job.settings.model)
            checkpoints.load_weights(self.reference, job.parent)
        self.cursor = 0
        if is_main():
            self.reward = load_reward(self.domain, self.settings.reward)

    def step(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        with stopwatch(metrics, "seconds_refit"):
            self.rollouts.refit(self.policy, version=step)
        with stopwatch(metrics, "seconds_rollout"):
            samples, self.cursor, measured = broadcast(self._rollout(step) if is_main() else None)
        with stopwatch(metrics, "seconds_train"):
            trained = self._train(samples)
        return {**measured, **trained, **broadcast(metrics)}

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def restore(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]

    def _updates(self, steps: int) -> int:
        return steps * self.settings.updates_per_rollout

    def _rollout(self, step: int) -> tuple[list[Sample], int, dict[str, float]]:
        """Main rank only: graded samples with advantages, the new cursor, and metrics."""
        settings = self.settings
        prompts = PromptStream(
            settings.prompts,
            self.domain,
            self.job.settings.seed,
            self.job.stage,
            cursor=self.cursor,
        )
        problems = prompts.take(settings.sampling.prompts_per_step)
        samples = self.rollouts.sample({self.domain: problems}, settings.sampling, f"step {step}")
        self.rollouts.grade(samples, problems, self.reward)
        rewards = torch.tensor([sample.reward for sample in samples]).view(len(problems), -1)
        advantages = group_advantages(rewards, settings.objective.advantage).flatten().tolist()
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = advantage
        self.rollouts.record(samples, step)
        measured = {
            "reward": rewards.mean().item(),
            "zero_variance": zero_variance(rewards).float().mean().item(),
            "unfinished": sum(not sample.finished for sample in samples) / len(samples),
            "response_tokens": sum(len(sample.response) for sample in samples) / len(samples),
        }
        return samples, prompts.cursor, measured

    def _train(self, samples: list[Sample]) -> dict[str, float]:
        """`updates_per_rollout` optimizer steps, each on its own share of the prompts."""
        settings = self.settings
        group, updates = settings.sampling.group_size, settings.updates_per_rollout
        shares = [
            [sample for i, sample in enumerate(samples) if (i // group) % updates == update]
            for update in range(updates)
        ]
        batches = [
            batch.split(
                share,
                *data_rank(),
                settings.loop.micro_batch_tokens,
                replay=settings.routing.replay == "r3",
            )
            for share in shares
        ]
        everything = [part for share in batches for part in share]
        temperature = settings.sampling.temperature
        mismatch = add_old_logprobs(
            self.policy, everything, temperature, self.job.settings.engine.max_logprob_difference
        )
        if self.reference is not None:
            logprobs = self.reference.target_logprobs(
                [part.without_routes() for part in everything], temperature
            )
            for part, reference in zip(everything, logprobs, strict=True):
                part.reference_logprobs = reference
        rate = self.policy.learning_rate
        measured = [self._update(share, part) for share, part in zip(shares, batches, strict=True)]
        mean = {name: sum(update[name] for update in measured) / updates for name in measured[0]}
        return {**mismatch, **mean, "learning_rate": rate}

    def _update(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        objective = self.settings.objective
        temperature = self.settings.sampling.temperature
        totals = Totals(len(samples), sum(len(sample.response) for sample in samples))

        def loss(
            logits: torch.Tensor, part: MicroBatch
        ) -> tuple[torch.Tensor, tuple[float, dict[str, MetricSum]]]:
            assert part.old_logprobs is not None
            log_probs = vocabulary.gather_targets(
                vocabulary.log_softmax(logits, temperature), part.targets
            )
            result = policy_loss(
                log_probs,
                part.old_logprobs,
                part.advantages,
                part.mask,
                totals,
                objective,
                part.reference_logprobs,
            )
            return result.loss, (result.loss.item(), result.metrics)

        parts = self.policy.accumulate(batches, loss)
        norm = self.policy.step()
        shares = reduce_sums([metrics for _, metrics in parts], totals)
        shares["loss"] = sum(value for value, _ in parts)
        return {**sum_over_data(shares), "gradient_norm": norm}
