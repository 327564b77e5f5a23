"""The merge: students sample, and each prompt's own domain expert grades every token."""

from __future__ import annotations

from typing import Any

import torch

from parallel import batch, checkpoints, vocabulary
from parallel.batch import MicroBatch
from parallel.distributed import broadcast, is_main, sum_over_data
from parallel.policy import Policy, TrainedPolicy, data_rank
from parallel.sample import Sample
from stages.domains.prompts import PromptStream
from stages.domains.rewards import Reward, load_reward
from stages.loop import train
from stages.objectives.aggregation import Totals, token_mean
from stages.objectives.reverse_kl import reverse_kl
from stages.rollout import Rollouts, add_old_logprobs, stopwatch
from stages.settings import StageJob

DIVERGENCES = {"full_vocab_reverse_kl": reverse_kl}


def run(job: StageJob) -> None:
    """Train the merge to its last step."""
    train(Merge(job), job, job.settings.merge.loop)


class Merge:
    """Full-vocabulary reverse KL on student trajectories (section 7; DeepSeek-V4, Eq. 29)."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.settings = job.settings.merge
        self.domains = job.settings.experts
        self.policy = TrainedPolicy(
            job.settings.model, self.settings.optimizer, self.settings.loop.steps
        )
        self.teachers = {}
        for domain, checkpoint in job.teachers.items():
            self.teachers[domain] = Policy(job.settings.model)
            checkpoints.load_weights(self.teachers[domain], checkpoint)
        self.rollouts = Rollouts(job)
        self.cursors = dict.fromkeys(self.domains, 0)
        self.rewards: dict[str, Reward] = {}
        if is_main():
            self.rewards = {
                domain: load_reward(domain, settings.reward)
                for domain, settings in self.domains.items()
            }

    def step(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        with stopwatch(metrics, "seconds_refit"):
            self.rollouts.refit(self.policy, version=step)
        with stopwatch(metrics, "seconds_rollout"):
            samples, self.cursors, measured = broadcast(self._rollout(step) if is_main() else None)
        with stopwatch(metrics, "seconds_train"):
            trained = self._train(samples)
        return {**measured, **trained, **broadcast(metrics)}

    def state(self) -> dict[str, Any]:
        return {"cursors": self.cursors}

    def restore(self, state: dict[str, Any]) -> None:
        self.cursors = state["cursors"]

    def _rollout(
        self, step: int
    ) -> tuple[dict[str, list[Sample]], dict[str, int], dict[str, float]]:
        """Main rank only: each domain's samples, the new cursors, and metrics.

        The reward is only watched: the teacher's distribution is what the student learns from.
        """
        drawn: dict[str, list[Sample]] = {}
        cursors = {}
        for domain, settings in self.domains.items():
            prompts = PromptStream(
                settings.prompts,
                domain,
                self.job.settings.seed,
                self.job.stage,
                cursor=self.cursors[domain],
            )
            problems = prompts.take(self.settings.sampling.prompts_per_step)
            cursors[domain] = prompts.cursor
            sampling = self.settings.sampling
            drawn[domain] = self.rollouts.sample({domain: problems}, sampling, f"step {step}")
            self.rollouts.grade(drawn[domain], problems, self.rewards[domain])
        samples = [sample for part in drawn.values() for sample in part]
        self.rollouts.record(samples, step)
        measured = {
            "reward": sum(sample.reward or 0.0 for sample in samples) / len(samples),
            "unfinished": sum(not sample.finished for sample in samples) / len(samples),
            "response_tokens": sum(len(sample.response) for sample in samples) / len(samples),
        }
        return drawn, cursors, measured

    def _train(self, drawn: dict[str, list[Sample]]) -> dict[str, float]:
        settings = self.settings
        # A micro-batch holds one domain, and so has one teacher.
        batches = [
            part
            for samples in drawn.values()
            for part in batch.split(
                samples,
                *data_rank(),
                settings.loop.micro_batch_tokens,
                replay=settings.routing.replay == "r3",
            )
        ]
        temperature = settings.sampling.temperature
        mismatch = add_old_logprobs(
            self.policy, batches, temperature, self.job.settings.engine.max_logprob_difference
        )
        sequences = sum(map(len, drawn.values()))
        tokens = sum(len(sample.response) for part in drawn.values() for sample in part)
        totals = Totals(sequences, tokens)

        def loss(logits: torch.Tensor, part: MicroBatch) -> tuple[torch.Tensor, float]:
            student = vocabulary.log_softmax(logits)
            teacher = self._teacher_log_probs(part)
            divergence = DIVERGENCES[settings.method](student, teacher, vocabulary.sum_vocabulary)
            value = token_mean(divergence, part.mask, totals)
            return value, value.item()

        rate = self.policy.learning_rate
        values = self.policy.accumulate(batches, loss)
        norm = self.policy.step()
        summed = sum_over_data({"loss": sum(values)})
        return {
            **mismatch,
            **summed,
            "teacher_kl": summed["loss"],
            "gradient_norm": norm,
            "learning_rate": rate,
        }

    def _teacher_log_probs(self, part: MicroBatch) -> torch.Tensor:
        """The batch's own teacher, [B, T, vocabulary / TP]; it routes by itself."""
        teacher = self.teachers[part.samples[0].domain]
        [log_probs] = teacher.evaluate(
            [part.without_routes()], lambda logits, _: vocabulary.log_softmax(logits)
        )
        return log_probs
