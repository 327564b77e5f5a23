"""The merge: the student samples, and the expert of each prompt's domain grades every token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from parallel.batch import MicroBatch, Responses
from parallel.checkpoint import load
from parallel.distributed import sum_over_data
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.data.settings import NoCurriculumSettings
from stages.domains import RolloutSettings
from stages.kinds.distill import DistillSettings
from stages.loop import train
from stages.objectives.groups import Batch
from stages.objectives.loss import Totals, token_mean
from stages.sampling.step import OnPolicyStage, StepSamples
from stages.settings import StageJob

# KL(student || teacher) over the whole vocabulary.
DIVERGENCES = {"full_vocab_reverse_kl": Responses.kl}


def run(job: StageJob) -> None:
    """Train the merge to its last step."""
    stage = Merge(job)
    train(stage, job, stage.loop)
    stage.close()


class Merge(OnPolicyStage):
    """The stage that minimises the full-vocabulary reverse KL on student samples.

    Student and teacher are compared at temperature 1, whatever the sampling temperature. Source:
    DeepSeek-V4, Eq. 29.
    """

    def __init__(self, job: StageJob) -> None:
        settings = job.own
        assert isinstance(settings, DistillSettings)
        self.own = settings
        rollout = RolloutSettings(**settings.rollout.model_dump())
        # Teachers grade prompts of any solve rate, so the merge needs no curriculum.
        domains = {
            domain: expert.model_copy(update={"curriculum": NoCurriculumSettings()})
            for domain, expert in job.own_domains.items()
        }
        super().__init__(job, settings, rollout, domains, settings.loop.steps)
        self.divergence = DIVERGENCES[settings.method]
        self.teachers = {}
        for domain, checkpoint in job.teachers.items():
            self.teachers[domain] = teacher = Policy(job.settings.model, job.settings.layout)
            self.policy.residency.share.add(teacher.residency)
            load.weights(teacher, checkpoint)

    def split_updates(self, batch: Batch) -> StepSamples:
        """Return all samples as one update; their rewards are only logged."""
        return StepSamples([[sample for group in batch.groups for sample in group.samples]], {})

    def packed_together(self, samples: list[Sample]) -> dict[str, list[Sample]]:
        """Return the samples of each domain, since each has one teacher."""
        return {
            domain: [each for each in samples if each.domain == domain] for domain in self.domains
        }

    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Accumulate the gradients of the KL to each domain's teacher; return the metrics."""
        for domain, teacher in self.teachers.items():  # they choose their own routes
            parts = [part for part in batches if part.domain == domain]
            logits = teacher.response_logits([part.without_routes() for part in parts])
            # `logits` is empty except on the last pipeline stage.
            for part, theirs in zip(parts, logits, strict=False):
                part.teacher = theirs
        tokens = Counter(dict.fromkeys(self.domains, 0))
        for sample in samples:
            tokens[sample.domain] += len(sample.learned)
        shares = weights_of(self.own, tokens)

        def loss(responses: Responses) -> tuple[torch.Tensor, tuple[str, float]]:
            part = responses.batch
            assert part.teacher is not None
            with torch.no_grad():
                self.remember(part, responses.logprobs(self.sampling.temperature))
            mean = Totals(len(samples), tokens[part.domain])
            value = token_mean(self.divergence(responses, part.teacher), part.mask, mean)
            return shares[part.domain] * value, (part.domain, value.item())

        read = sum(sample.length for sample in samples)
        means = dict.fromkeys(self.domains, 0.0)
        for domain, value in self.policy.accumulate(batches, loss, read):
            means[domain] += value
        means = sum_over_data(means)
        total = sum(shares[domain] * mean for domain, mean in means.items())
        return {
            "loss": total,
            "teacher_kl": total,
            **{f"teacher_kl/{domain}": mean for domain, mean in means.items()},
            **{f"token_share/{domain}": n / tokens.total() for domain, n in tokens.items()},
        }

    def score(self, metrics: dict[str, float]) -> float:
        """Return minus the KL to the teachers."""
        return -metrics["teacher_kl"]


def weights_of(merge: DistillSettings, tokens: Mapping[str, int]) -> dict[str, float]:
    """Return each domain's weight in the loss; the weights sum to 1.

    `tokens` counts the update's learned tokens by domain. A domain without any has weight 0.
    """
    by_tokens = merge.averaged_over == "tokens"
    weights = {
        domain: merge.domain_weights.get(domain, 1.0) * (count if by_tokens else count > 0)
        for domain, count in tokens.items()
    }
    total = sum(weights.values())
    return {domain: weight / max(total, 1e-9) for domain, weight in weights.items()}
