"""The merge: students sample, and each prompt's own domain expert grades every token."""

from __future__ import annotations

import torch

from parallel import checkpoints, vocabulary
from parallel.batch import MicroBatch
from parallel.distributed import is_main, sum_over_data
from parallel.policy import Policy, TrainedPolicy
from parallel.sample import Sample
from stages.domains.prompts import PromptStream
from stages.domains.rewards import Reward, load_reward
from stages.loop import train
from stages.objectives.aggregation import Totals, token_mean
from stages.objectives.reverse_kl import reverse_kl
from stages.on_policy import OnPolicyStage, Rollout, rollout_metrics
from stages.settings import StageJob

DIVERGENCES = {"full_vocab_reverse_kl": reverse_kl}


def run(job: StageJob) -> None:
    """Train the merge to its last step."""
    stage = Merge(job)
    train(stage, job, stage.loop)


class Merge(OnPolicyStage):
    """Full-vocabulary reverse KL on student trajectories (section 7; DeepSeek-V4, Eq. 29).

    Student and teacher are compared at temperature 1, whatever the student samples with. Domains
    weigh by their tokens.
    """

    def __init__(self, job: StageJob) -> None:
        settings = job.settings.merge
        policy = TrainedPolicy(job.settings.model, settings.optimizer, settings.loop.steps)
        super().__init__(job, policy, settings.sampling, settings.routing, settings.loop)
        self.divergence = DIVERGENCES[settings.method]
        self.domains = job.settings.experts
        self.teachers = {}
        for domain, checkpoint in job.teachers.items():
            self.teachers[domain] = Policy(job.settings.model)
            checkpoints.load_weights(self.teachers[domain], checkpoint)
        self.rewards: dict[str, Reward] = {}
        if is_main():
            self.rewards = {
                domain: load_reward(domain, settings.reward)
                for domain, settings in self.domains.items()
            }

    def roll_out(self, purpose: str) -> Rollout:
        """Every domain's samples; their reward is only watched, the teachers are learned from."""
        samples: list[Sample] = []
        cursors = {}
        for domain, settings in self.domains.items():
            prompts = PromptStream(
                settings.prompts,
                domain,
                self.job.settings.seed,
                self.job.stage,
                cursor=self.cursors.get(domain, 0),
            )
            problems = prompts.take(self.sampling.prompts_per_step)
            drawn = self.rollouts.sample(domain, problems, self.sampling, purpose)
            self.rollouts.grade(drawn, problems, self.rewards[domain])
            cursors[domain] = prompts.cursor
            samples += drawn
        return Rollout([samples], cursors, rollout_metrics(samples))

    def split(self, samples: list[Sample]) -> list[MicroBatch]:
        """A micro-batch holds one domain, and so has one teacher."""
        parts: list[MicroBatch] = []
        for domain in self.domains:
            parts += super().split([sample for sample in samples if sample.domain == domain])
        return parts

    def update(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """One step towards each domain's own teacher, averaged over all tokens."""
        totals = Totals(len(samples), sum(len(sample.response) for sample in samples))

        def loss(logits: torch.Tensor, part: MicroBatch) -> tuple[torch.Tensor, float]:
            student = vocabulary.log_softmax(logits)
            divergence = self.divergence(
                student, self._teacher_log_probs(part), vocabulary.sum_vocabulary
            )
            value = token_mean(divergence, part.mask, totals)
            return value, value.item()

        values = self.policy.accumulate(batches, loss)
        norm = self.policy.step()
        summed = sum_over_data({"loss": sum(values)})
        return {**summed, "teacher_kl": summed["loss"], "gradient_norm": norm}

    def score(self, metrics: dict[str, float]) -> float:
        """Being close to the teachers is good."""
        return -metrics["teacher_kl"]

    def _teacher_log_probs(self, part: MicroBatch) -> torch.Tensor:
        """The batch's own teacher, [B, T, vocabulary / TP]; it routes by itself."""
        teacher = self.teachers[part.samples[0].domain]
        [log_probs] = teacher.evaluate(
            [part.without_routes()], lambda logits, _: vocabulary.log_softmax(logits)
        )
        return log_probs
