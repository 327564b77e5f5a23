"""The merge: the student samples, and the expert of each prompt's domain grades every token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from parallel.batch import MicroBatch, Responses
from parallel.distributed import is_main, sum_over_data
from parallel.machine.device import device
from parallel.sample import Sample
from stages.data.settings import NoCurriculumSettings
from stages.domains import RolloutSettings
from stages.kinds.distill.domain_shares import add_slope, gradient_shares, weights_of
from stages.kinds.distill.merge_data import MergeData
from stages.kinds.distill.preflight import Preflight
from stages.kinds.distill.self_teacher import Contexts, SelfTeacher
from stages.kinds.distill.settings import DistillSettings, Weighted
from stages.kinds.distill.source_settings import SELF, given_prompts
from stages.kinds.distill.teachers import Teachers
from stages.kinds.distill.teaching import TaughtTokens
from stages.loop import train
from stages.objectives.groups import Batch, assign_advantages, graded_samples
from stages.objectives.kl import KLSettings
from stages.objectives.loss import Totals, token_mean
from stages.objectives.models import Reference
from stages.objectives.registry import METHODS
from stages.objectives.surrogate import CorrectionSettings
from stages.sampling.recording import add_observed
from stages.sampling.step import OnPolicyStage, StepSamples
from stages.settings import StageJob

GAP_DECAY = 0.9  # of the moving averages of `teacher_kl` that `averaged_over: gap` weighs by


def run(job: StageJob) -> None:
    """Train the merge to its last step."""
    stage = DistillStage(job)
    train(stage, job, stage.loop)
    stage.close()


class DistillStage(OnPolicyStage):
    """The stage that brings a student to the teachers of its domains, on its own samples.

    Over the vocabulary student and teacher are compared at temperature 1, whatever the sampling
    temperature; a method of sampled tokens compares what was sampled from. `teacher_kl` is the
    full-vocabulary reverse KL (DeepSeek-V4, Eq. 29), whatever the method.
    """

    def __init__(self, job: StageJob) -> None:
        settings = job.block_settings
        assert isinstance(settings, DistillSettings)
        self.block_settings = settings
        rollout = RolloutSettings(**settings.rollout.model_dump())
        # Teachers grade prompts of any solve rate, so the merge needs no curriculum.
        domains = {
            domain: expert.model_copy(update={"curriculum": NoCurriculumSettings()})
            for domain, expert in job.own_domains.items()
        }
        sampled = sampled_settings(settings)
        super().__init__(job, sampled, rollout, domains, settings.loop.steps)
        self.data = MergeData(job, settings)
        self.method = settings.method
        self.gaps: dict[str, float] = {}  # nats a token that each domain was from its teacher
        self.start: Reference | None = None
        if (start := self.method.start_model) is not None:
            self.start = Reference(job, self.policy, KLSettings(reference=start), start)
        self.teachers = Teachers(job, self.policy, settings)
        # By label, which names a teacher of a domain.
        self.weights = {domain: settings.teacher_weights(domain) for domain in self.domains}
        self.names = {
            label: f"{domain}/{name}"
            for domain, by_teacher in self.weights.items()
            for label, name in settings.teacher_names(domain).items()
            if len(by_teacher) > 1
        }
        self.self_teacher: SelfTeacher | None = None
        self.contexts: Contexts | None = None
        tokenizer = self.engines.tokenizer
        if taught := settings.self_taught(job.domains):
            states = self.teachers.hidden_states
            self.self_teacher = SelfTeacher(job, self.policy, settings.self_teacher, taught, states)
            taught_domains = {domain: domains[domain] for domain in taught}
            most = job.settings.model.max_positions
            self.contexts = Contexts(settings.self_teacher, taught_domains, tokenizer, most)
        self.preflight = Preflight(job.stage, tokenizer, self._models())

    def step(self, step: int) -> dict[str, float]:
        if is_main():
            self.data.draw(step)
        return super().step(step)

    def split_updates(self, batch: Batch) -> StepSamples:
        """Return all samples as one update, with advantages if the method reads them.

        A sample whose reward failed has an advantage of 0: its teacher grades it all the same.
        """
        for name, domain in self.domains.items() if self.method.needs_rewards else ():
            domain_groups = [group for group in batch.groups if group.problem.domain == name]
            weights = {reward_name: reward.weight for reward_name, reward in domain.rewards.items()}
            assign_advantages(domain_groups, domain.objective.advantage, weights)
        graded_samples(batch.groups)  # numbers them
        context_metrics = {} if self.contexts is None else self.contexts.assign(batch.groups)
        samples = [sample for group in batch.groups for sample in group.samples]
        return StepSamples(
            [[*samples, *self.data.drawn]], {**context_metrics, **self.data.too_long}
        )

    def packed_together(self, samples: list[Sample]) -> list[tuple[str, list[Sample]]]:
        """Return the samples of each domain, since each has its own teachers, and its data apart.

        What no engine has sampled has no routes to replay and no log-probabilities to compare.
        Both kinds of a domain are adjacent, so that a teacher's head is read once for them.
        """
        kinds = sorted({False, *(sample.demonstrated for sample in samples)})
        return [
            (
                domain,
                [
                    sample
                    for sample in samples
                    if (sample.domain, sample.demonstrated) == (domain, data)
                ],
            )
            for domain in self.domains
            for data in kinds
        ]

    def correction(self, micro_batch: MicroBatch) -> CorrectionSettings:
        """Return how the method weighs sampled tokens by pi / mu."""
        return self.method.weighing

    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Accumulate the gradients of each domain's loss to its teacher; return the metrics."""
        self._grade(batches)
        tokens = Counter(dict.fromkeys(self.domains, 0))
        for sample in samples:
            tokens[sample.domain] += len(sample.learned)
        shares = weights_of(self.block_settings, tokens, self.gaps)
        slopes = {domain: torch.zeros((), device=device()) for domain in self.domains}

        def loss(responses: Responses) -> tuple[torch.Tensor, tuple[str, float, Weighted]]:
            domain = responses.batch.domain
            value, kls = self._loss(responses, Totals(len(samples), tokens[domain]))
            add_slope(slopes[domain], responses.logits)
            self.data.observe(responses.batch, value.item())
            return shares[domain] * value, (domain, value.item(), kls)

        read = sum(sample.length for sample in samples)
        losses = dict.fromkeys(self.domains, 0.0)
        by_teacher = {label: 0.0 for weights in self.weights.values() for label in weights}
        for domain, value, kls in self.policy.accumulate(batches, loss, read):
            losses[domain] += value
            for label, kl in kls.items():
                by_teacher[label] += kl
        self.teachers.clear(batches)
        losses, by_teacher = sum_over_data(losses), sum_over_data(by_teacher)
        kls = {
            domain: sum(weight * by_teacher[label] for label, weight in weights.items())
            for domain, weights in self.weights.items()
        }
        return {
            "loss": sum(shares[domain] * value for domain, value in losses.items()),
            "teacher_kl": sum(shares[domain] * kl for domain, kl in kls.items()),
            **{f"teacher_kl/{domain}": kl for domain, kl in kls.items()},
            **{f"teacher_kl/{name}": by_teacher[label] for label, name in self.names.items()},
            **{f"token_share/{domain}": n / max(tokens.total(), 1) for domain, n in tokens.items()},
            **gradient_shares(slopes),
            **self.data.metrics(samples, losses),
            **(self.preflight.report() if self._version == 1 else {}),
        }

    def after_update(self, measured: dict[str, float]) -> dict[str, float]:
        """Move each domain's gap towards the KL of this update."""
        for domain in self.domains:
            if measured[f"token_share/{domain}"] > 0:
                kl = max(measured[f"teacher_kl/{domain}"], 0.0)
                gap = self.gaps.get(domain, kl)
                self.gaps[domain] = GAP_DECAY * gap + (1 - GAP_DECAY) * kl
        if self.self_teacher is not None:
            self.self_teacher.update()
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state of the prompts, and the gaps that weights follow."""
        by_gap = self.block_settings.averaged_over == "gap"
        gaps = {"gaps": self.gaps} if by_gap else {}
        return {**super().state(), **self.data.state(), **gaps}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        super().restore(state)
        self.data.restore(state)
        if self.block_settings.averaged_over == "gap":
            self.gaps = state["gaps"]

    def score(self, metrics: dict[str, float]) -> float:
        """Return minus the KL to the teachers."""
        return -metrics["teacher_kl"]

    def _grade(self, batches: list[MicroBatch]) -> None:
        """Set each domain's teacher in its batches, and the start if the method reads it."""
        self.teachers.grade(batches)
        if self.self_teacher is not None:
            self.self_teacher.grade(batches)
        if self.start is not None:
            self.start.compute_logprobs(batches, self.sampling.temperature, logits=True)

    def _models(self) -> dict[str, str]:
        """Return every teacher, a stage or a path, by its name in metrics."""
        models = {}
        for label in (label for weights in self.weights.values() for label in weights):
            path = self.job.teachers.get(label, Path(SELF))
            saved = path.parent.name == "checkpoints"
            models[self.names.get(label, label)] = path.parents[1].name if saved else str(path)
        return models

    def _loss(self, responses: Responses, totals: Totals) -> tuple[torch.Tensor, Weighted]:
        """Return the loss of a micro-batch, and the KL to each teacher of its domain, by label.

        The student's log-probabilities are remembered as pi_old.
        """
        micro_batch, temperature = responses.batch, self.sampling.temperature
        with torch.set_grad_enabled(self.method.samples):
            logprobs = responses.logprobs(temperature)
        self.remember(responses, logprobs)
        terms, kls = [], {}
        for kept_logits, (label, weight) in zip(
            micro_batch.teachers, self.weights[micro_batch.domain].items(), strict=True
        ):
            taught = TaughtTokens(
                responses, kept_logits.load(), micro_batch.reference, logprobs, temperature
            )
            values = METHODS[self.method.name].function(taught, self.method)
            value = token_mean(values, micro_batch.mask, totals)
            add_observed(micro_batch, "teacher_kl", weight * values)
            kl = value
            if not self.method.is_kl:
                with torch.no_grad():
                    kl = token_mean(responses.kl(taught.teacher), micro_batch.mask, totals)
            terms.append(weight * value)
            kls[label] = kl.item()
            if self._version == 1:
                name = self.names.get(label, label)
                self.preflight.observe(name, responses, taught.teacher, kls[label])
        return sum(terms[1:], terms[0]), kls


def sampled_settings(merge: DistillSettings) -> DistillSettings:
    """Return the settings with the prompts of a step that the student answers itself."""
    sampling = merge.sampling
    prompts = sampling.prompts_per_step - given_prompts(merge.data_share, sampling)
    student_sampling = sampling.model_copy(update={"prompts_per_step": prompts})
    return merge.model_copy(update={"sampling": student_sampling})
