"""The merge: students sample, and each prompt's own domain expert grades every token."""

from __future__ import annotations

from dataclasses import replace

import torch

from parallel import checkpoints
from parallel.batch import MicroBatch
from parallel.distributed import sum_over_data
from parallel.policy import Policy, TrainedPolicy
from parallel.responses import Responses
from parallel.sample import Sample
from stages.backlog import Batch
from stages.curriculum.settings import NoCurriculumSettings
from stages.loop import train
from stages.objectives.aggregation import Totals, token_mean
from stages.objectives.settings import NoCorrectionSettings
from stages.on_policy import OnPolicyStage, Rollout
from stages.settings import RolloutSettings, StageJob

# KL(student || teacher), each over the whole vocabulary.
DIVERGENCES = {"full_vocab_reverse_kl": Responses.kl}


def run(job: StageJob) -> None:
    """Train the merge to its last step."""
    stage = Merge(job)
    train(stage, job, stage.loop)
    stage.close()


class Merge(OnPolicyStage):
    """Full-vocabulary reverse KL on student trajectories (section 7; DeepSeek-V4, Eq. 29).

    Student and teacher are compared at temperature 1, whatever the student samples with. Domains
    weigh by their tokens.
    """

    def __init__(self, job: StageJob) -> None:
        settings = job.settings.merge
        assert settings is not None
        policy = TrainedPolicy(
            job.settings.model,
            job.settings.layout,
            settings.optimizer,
            settings.loop.steps,
            settings.routing,
        )
        super().__init__(
            job,
            policy,
            # The teachers grade all prompts alike: they are taken as they come.
            {
                domain: expert.model_copy(update={"curriculum": NoCurriculumSettings()})
                for domain, expert in job.settings.experts.items()
            },
            settings.sampling,
            RolloutSettings(**settings.rollout.model_dump()),
            settings.routing,
            settings.loop,
            NoCorrectionSettings(),
        )
        self.divergence = DIVERGENCES[settings.method]
        self.domains = job.settings.experts
        self.teachers = {}
        for domain, checkpoint in job.teachers.items():
            self.teachers[domain] = Policy(job.settings.model, job.settings.layout)
            checkpoints.load_weights(self.teachers[domain], checkpoint)

    def share_out(self, batch: Batch) -> Rollout:
        """All samples at once; their reward is only watched, the teachers are learned from."""
        return Rollout([[sample for group in batch.groups for sample in group.samples]], {})

    def split(self, samples: list[Sample]) -> list[MicroBatch]:
        """A micro-batch holds one domain, and so has one teacher."""
        parts: list[MicroBatch] = []
        for domain in self.domains:
            own = super().split([sample for sample in samples if sample.domain == domain])
            parts += [replace(part, domain=domain) for part in own]
        return parts

    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Those towards each domain's own teacher, averaged over all tokens."""
        self._add_teachers(batches)
        totals = Totals(len(samples), sum(len(sample.response) for sample in samples))

        def loss(responses: Responses) -> tuple[torch.Tensor, float]:
            part = responses.batch
            assert part.teacher is not None
            with torch.no_grad():
                self.remember(part, responses.log_probs(self.sampling.temperature))
            value = token_mean(self.divergence(responses, part.teacher), part.mask, totals)
            return value, value.item()

        read = sum(sample.length for sample in samples)
        values = self.policy.accumulate(batches, loss, read)
        summed = sum_over_data({"loss": sum(values)})
        return {**summed, "teacher_kl": summed["loss"]}

    def score(self, metrics: dict[str, float]) -> float:
        """Being close to the teachers is good."""
        return -metrics["teacher_kl"]

    def _add_teachers(self, batches: list[MicroBatch]) -> None:
        """What each batch's own teacher says of it, as hidden states and a head; the teacher routes
        by itself."""
        for domain, teacher in self.teachers.items():
            parts = [part for part in batches if part.domain == domain]
            logits = teacher.response_logits([part.without_routes() for part in parts])
            for part, theirs in zip(parts, logits, strict=False):  # none but on the last stage
                part.teacher = theirs
