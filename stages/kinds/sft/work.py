"""Supervised fine-tuning on the demonstrations of domains, such as a cold start, or on a mixture.

A mixture has sources with weights: what other stages collected, files, and demonstrations.
"""

from __future__ import annotations

import torch

from parallel import batch
from parallel.batch import RankPlace, Responses
from parallel.distributed import broadcast, is_main, sum_over_data
from parallel.model.policy import TrainedPolicy
from parallel.sample import Sample
from stages.data.demonstrations import ConversationStream
from stages.data.problem import seed_of
from stages.data.settings import CollectedFileSettings, ConversationFileSettings
from stages.data.tokenizer import Tokenizer
from stages.kinds.import_weights.work import look_for_held_out
from stages.kinds.mixture_settings import StageSourceSettings
from stages.kinds.mixture_stage import MixtureStage, SequenceSource, collected, demonstrated
from stages.kinds.sft.settings import DomainDemonstrationsSettings, SftSettings
from stages.loop import train
from stages.objectives.loss import Totals, token_mean
from stages.settings import StageJob


def run(job: StageJob) -> None:
    """Train on demonstrations, or on a mixture of sources, to the stage's last step."""
    stage = Sft(job)
    train(stage, job, stage.block_settings.loop)


class Sft(MixtureStage[Sample]):
    """The stage that minimises cross-entropy, averaged over the learned tokens of each step."""

    def __init__(self, job: StageJob) -> None:
        assert isinstance(job.block_settings, SftSettings)
        super().__init__(job, job.block_settings)
        self.block_settings = settings = job.block_settings
        self.policy = TrainedPolicy(
            job.settings.model,
            job.settings.layout,
            settings.optimizer,
            settings.loop.steps,
            settings.routing,
        )
        if is_main():
            look_for_held_out(job.settings, self.tokenizer)
            of = _mixed if settings.data else demonstrated
            self.sources = {
                name: of(job, name, self.tokenizer) for name in (settings.data or job.domains)
            }

    def step(self, step: int) -> dict[str, float]:
        samples, too_long = broadcast(self.draw(step) if is_main() else None)
        totals = Totals(len(samples), sum(len(sample.learned) for sample in samples))
        budget = self.block_settings.loop.micro_batch_tokens
        batches = batch.split(samples, RankPlace.here(), budget, replay=False)

        def cross_entropy(responses: Responses) -> tuple[torch.Tensor, float]:
            loss = token_mean(-responses.logprobs(), responses.batch.mask, totals)
            return loss, loss.item()

        read = sum(sample.length for sample in samples)
        losses = self.policy.accumulate(batches, cross_entropy, read)
        metrics = sum_over_data({"loss": sum(losses)})
        return {**metrics, "too_long": too_long, **self.finish_step(step, batches, samples)}

    def counts(self) -> dict[str, int]:
        """Return the number of sequences of each source in the next step."""
        if self.block_settings.data:
            return super().counts()
        domains = self.job.own_domains.items()
        return {name: domain.demonstrations.sequences_per_step for name, domain in domains}


def _mixed(job: StageJob, name: str, tokenizer: Tokenizer) -> SequenceSource:
    """Return a source of the stage's mixture.

    Prompts of any domain may be in it: all domains hold the same fraction out, by content.
    """
    assert isinstance(job.block_settings, SftSettings)
    source = job.block_settings.data[name]
    if isinstance(source, DomainDemonstrationsSettings):
        return demonstrated(job, source.domain, tokenizer)
    if isinstance(source, StageSourceSettings):
        file_settings: ConversationFileSettings = CollectedFileSettings(path=collected(job, name))
    else:
        file_settings = source
    first_domain = job.settings.domains[job.domains[0]]
    order = seed_of(job.settings.seed, job.seeded_as, name, "data")
    return ConversationStream(
        file_settings,
        tokenizer,
        name,
        order,
        first_domain.prompts.held_out_fraction,
        file_settings.max_tokens or job.settings.model.max_positions,
        key=f"stages.{job.block}.data.{name}",
    )
