"""The merge: the student samples, and the expert of each prompt's domain grades every token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from parallel.batch import MicroBatch, Responses
from parallel.device import device
from parallel.distributed import is_main, sum_over_data, sum_over_shards
from parallel.model.vocabulary import HeadLogits
from parallel.sample import Sample
from stages.data.settings import NoCurriculumSettings
from stages.domains import RolloutSettings
from stages.kinds.distill import DistillSettings
from stages.kinds.merge_data import given_prompts
from stages.kinds.self_teacher import SELF
from stages.loop import train
from stages.merge_data import MergeData
from stages.objectives.groups import Batch, assign_advantages
from stages.objectives.kl import KLSettings
from stages.objectives.loss import Totals, token_mean
from stages.objectives.models import Reference
from stages.objectives.registry import METHODS
from stages.objectives.surrogate import CorrectionSettings
from stages.objectives.teaching import TaughtTokens
from stages.preflight import Preflight
from stages.sampling.step import OnPolicyStage, StepSamples
from stages.self_teacher import Contexts, SelfTeacher
from stages.settings import StageJob
from stages.teachers import Teachers

GAP_DECAY = 0.9  # of the moving averages of `teacher_kl` that `averaged_over: gap` weighs by


def run(job: StageJob) -> None:
    """Train the merge to its last step."""
    stage = Merge(job)
    train(stage, job, stage.loop)
    stage.close()


class Merge(OnPolicyStage):
    """The stage that brings a student to the teachers of its domains, on its own samples.

    Over the vocabulary student and teacher are compared at temperature 1, whatever the sampling
    temperature; a method of sampled tokens compares what was sampled from. `teacher_kl` is the
    full-vocabulary reverse KL (DeepSeek-V4, Eq. 29), whatever the method.
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
        sampled = sampled_settings(settings)
        super().__init__(job, sampled, rollout, domains, settings.loop.steps)
        self.data = MergeData(job, settings)
        self.method = settings.method
        self.gaps: dict[str, float] = {}  # nats a token that each domain was from its teacher
        self.start: Reference | None = None
        if (start := self.method.start_model) is not None:
            self.start = Reference(job, self.policy, KLSettings(reference=start), start)
        self.teachers = Teachers(job, self.policy)
        self.self_teacher: SelfTeacher | None = None
        self.contexts: Contexts | None = None
        if taught := settings.self_taught(job.domains):
            self.self_teacher = SelfTeacher(job, self.policy, settings.self_teacher, taught)
            own = {domain: domains[domain] for domain in taught}
            most = job.settings.model.max_positions
            tokenizer = self.engines.tokenizer
            self.contexts = Contexts(settings.self_teacher, own, tokenizer, most)
        self.preflight = Preflight(job.stage, self.engines.tokenizer, self._teacher_name)

    def step(self, step: int) -> dict[str, float]:
        if is_main():
            self.data.draw(step)
        return super().step(step)

    def split_updates(self, batch: Batch) -> StepSamples:
        """Return all samples as one update, with advantages if the method reads them.

        A sample whose reward failed has an advantage of 0: its teacher grades it all the same.
        """
        for name, domain in self.domains.items() if self.method.needs_rewards else ():
            own = [group for group in batch.groups if group.problem.domain == name]
            weights = {part: reward.weight for part, reward in domain.rewards.items()}
            assign_advantages(own, domain.objective.advantage, weights)
        found = {} if self.contexts is None else self.contexts.assign(batch.groups)
        samples = [sample for group in batch.groups for sample in group.samples]
        return StepSamples([[*samples, *self.data.drawn]], {**found, **self.data.too_long})

    def packed_together(self, samples: list[Sample]) -> list[tuple[str, list[Sample]]]:
        """Return the samples of each domain, since each has one teacher, and its data apart.

        What no engine has sampled has no routes to replay and no log-probabilities to compare.
        """
        kinds = sorted({False, *(each.demonstrated for each in samples)})
        return [
            (
                domain,
                [each for each in samples if (each.domain, each.demonstrated) == (domain, data)],
            )
            for data in kinds
            for domain in self.domains
        ]

    def correction(self, part: MicroBatch) -> CorrectionSettings:
        """Return how the method weighs sampled tokens by pi / mu."""
        return self.method.weighing

    def gradients(self, samples: list[Sample], batches: list[MicroBatch]) -> dict[str, float]:
        """Accumulate the gradients of each domain's loss to its teacher; return the metrics."""
        self._grade(batches)
        tokens = Counter(dict.fromkeys(self.domains, 0))
        for sample in samples:
            tokens[sample.domain] += len(sample.learned)
        shares = weights_of(self.own, tokens, self.gaps)
        slopes = {domain: torch.zeros((), device=device()) for domain in self.domains}

        def loss(responses: Responses) -> tuple[torch.Tensor, tuple[str, float, float]]:
            part = responses.batch
            taught = self._taught(responses)
            mean = Totals(len(samples), tokens[part.domain])
            value = token_mean(METHODS[self.method.name](taught, self.method), part.mask, mean)
            kl = value
            if not self.method.is_kl:
                with torch.no_grad():
                    kl = token_mean(responses.kl(taught.teacher), part.mask, mean)
            _add_slope(slopes[part.domain], responses.logits)
            self.data.observe(part, value.item())
            if self._version == 1:
                self.preflight.observe(part.domain, responses, taught.teacher, kl.item())
            return shares[part.domain] * value, (part.domain, value.item(), kl.item())

        read = sum(sample.length for sample in samples)
        losses, kls = (dict.fromkeys(self.domains, 0.0) for _ in range(2))
        for domain, value, kl in self.policy.accumulate(batches, loss, read):
            losses[domain] += value
            kls[domain] += kl
        losses, kls, total = sum_over_data(losses), sum_over_data(kls), tokens.total()
        return {
            "loss": sum(shares[domain] * value for domain, value in losses.items()),
            "teacher_kl": sum(shares[domain] * kl for domain, kl in kls.items()),
            **{f"teacher_kl/{domain}": kl for domain, kl in kls.items()},
            **{f"token_share/{domain}": n / max(total, 1) for domain, n in tokens.items()},
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
        by_gap = self.own.averaged_over == "gap"
        gaps = {"gaps": self.gaps} if by_gap else {}
        return {**super().state(), **self.data.state(), **gaps}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        super().restore(state)
        self.data.restore(state)
        if self.own.averaged_over == "gap":
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

    def _teacher_name(self, domain: str) -> str:
        """Return the teacher of a domain for a message: a stage, or a path."""
        path = self.job.teachers.get(domain, Path(SELF))
        return path.parents[1].name if path.parent.name == "checkpoints" else str(path)

    def _taught(self, responses: Responses) -> TaughtTokens:
        """Return what the method compares; remember the student's log-probabilities as pi_old."""
        part, temperature = responses.batch, self.sampling.temperature
        assert part.teacher is not None
        with torch.set_grad_enabled(self.method.samples):
            logprobs = responses.logprobs(temperature)
        self.remember(part, logprobs)
        return TaughtTokens(responses, part.teacher, part.reference, logprobs, temperature)


def sampled_settings(merge: DistillSettings) -> DistillSettings:
    """Return the settings with the prompts of a step that the student answers itself."""
    sampling = merge.sampling
    prompts = sampling.prompts_per_step - given_prompts(merge.data_share, sampling)
    own = sampling.model_copy(update={"prompts_per_step": prompts})
    return merge.model_copy(update={"sampling": own})


def weights_of(
    merge: DistillSettings, tokens: Mapping[str, int], gaps: Mapping[str, float]
) -> dict[str, float]:
    """Return each domain's weight in the loss; the weights sum to 1.

    `tokens` counts the update's learned tokens by domain. A domain without any has weight 0. `gaps`
    are nats a token to each teacher; until one is above 0, `gap` weighs domains alike.
    """
    by = {domain: float(count > 0) for domain, count in tokens.items()}
    if merge.averaged_over == "tokens":
        by = dict(tokens)
    elif merge.averaged_over == "gap" and any(gaps.values()):
        by = {domain: present * gaps.get(domain, 0.0) for domain, present in by.items()}
    weights = {domain: merge.domain_weights.get(domain, 1.0) * by[domain] for domain in tokens}
    total = sum(weights.values())
    return {domain: weight / max(total, 1e-9) for domain, weight in weights.items()}


def gradient_shares(slopes: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return `gradient_share` by domain, of this rank's sums by domain. Collective.

    The sums are of |d loss / d logit| over tokens and vocabulary. A share of the weights' gradient
    would need a backward pass and a gradient buffer for each domain; this one is exact for the
    gradient that enters the model, costs one read of it, and knows no cancellation between tokens.
    """
    names = list(slopes)
    own = sum_over_shards(torch.stack([slopes[name] for name in names]))
    whole = sum_over_data(dict(zip(names, own.tolist(), strict=True)))
    total = sum(whole.values())
    return {f"gradient_share/{name}": whole[name] / (total or 1.0) for name in names}


def _add_slope(total: torch.Tensor, logits: torch.Tensor | HeadLogits) -> None:
    """Add the logits' gradient, when it is computed, to `total` as the sum of absolute values."""

    def add(gradient: torch.Tensor) -> None:
        total.add_(torch.linalg.vector_norm(gradient, 1, dtype=torch.float32))

    assert isinstance(logits, torch.Tensor)
    logits.register_hook(add)
