"""Supervised fine-tuning on the demonstrations of domains, such as a cold start."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from parallel import batch
from parallel.batch import RankPlace, Responses
from parallel.distributed import broadcast, is_main, sum_over_data
from parallel.model.policy import TrainedPolicy
from parallel.sample import Sample
from stages.data.demonstrations import ConversationStream, demonstrations, response_sample
from stages.data.problem import seed_of
from stages.data.prompts import PromptStream
from stages.data.settings import GeneratedDemonstrationSettings
from stages.data.tokenizer import Tokenizer, load_tokenizer
from stages.import_weights import look_for_held_out
from stages.kinds.sft import SftSettings
from stages.loop import train
from stages.metrics import token_efficiency
from stages.objectives.loss import Totals, token_mean
from stages.sampling.recording import record, samples_file
from stages.settings import StageJob


def run(job: StageJob) -> None:
    """Train on demonstrations to the stage's last step."""
    stage = Sft(job)
    train(stage, job, stage.own.loop)


class Sft:
    """The stage that minimises cross-entropy, averaged over the learned tokens of each step."""

    def __init__(self, job: StageJob) -> None:
        self.job = job
        self.settings = settings = job.settings
        assert isinstance(job.own, SftSettings)
        self.own = own = job.own
        self.policy = TrainedPolicy(
            settings.model,
            settings.layout,
            own.optimizer,
            own.loop.steps,
            own.routing,
        )
        self.tokenizer = load_tokenizer(settings.model)
        self.sources: dict[str, ConversationStream | GeneratedPool] = {}
        if is_main():
            look_for_held_out(settings, self.tokenizer)
            self.sources = {name: _source(job, name, self.tokenizer) for name in job.domains}

    def step(self, step: int) -> dict[str, float]:
        samples, too_long = broadcast(self._draw(step) if is_main() else None)
        totals = Totals(len(samples), sum(len(sample.learned) for sample in samples))
        budget = self.own.loop.micro_batch_tokens
        batches = batch.split(samples, RankPlace.here(), budget, replay=False)

        def cross_entropy(responses: Responses) -> tuple[torch.Tensor, float]:
            loss = token_mean(-responses.logprobs(), responses.batch.mask, totals)
            return loss, loss.item()

        rate = self.policy.learning_rate
        read = sum(sample.length for sample in samples)
        losses = self.policy.accumulate(batches, cross_entropy, read)
        norm = self.policy.step()
        if is_main() and self.settings.logging.auditable:
            path = samples_file(self.job.files.samples, step)
            record(path, [samples], self.tokenizer, auditable=True)
        return {
            **sum_over_data({"loss": sum(losses)}),
            **self.policy.routing_metrics(),
            **token_efficiency(batches),
            "too_long": too_long,
            "gradient_norm": norm,
            "learning_rate": rate,
        }

    def score(self, metrics: dict[str, float]) -> float:
        """Return minus the loss."""
        return -metrics["loss"]

    def state(self) -> dict[str, Any]:
        """Return the cursor of every domain's source; the main rank's state is saved."""
        return {"cursors": {domain: source.cursor for domain, source in self.sources.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for domain, source in self.sources.items():
            source.cursor = state["cursors"][domain]

    def _draw(self, step: int) -> tuple[list[Sample], float]:
        """Return the samples of a step, and the number of conversations skipped as too long."""
        before = sum(source.too_long for source in self.sources.values())
        samples: list[Sample] = []
        for domain, source in self.sources.items():
            count = self.settings.domains[domain].demonstrations.sequences_per_step
            samples += source.draw(step, count)
        return samples, float(sum(source.too_long for source in self.sources.values()) - before)


class GeneratedPool:
    """A pool of generated demonstrations, sampled with replacement; else a ConversationStream."""

    cursor = 0  # no state: a step's choice depends on its number alone
    too_long = 0

    def __init__(self, samples: list[Sample], domain: str, seed: int) -> None:
        self._samples, self._domain, self._seed = samples, domain, seed

    def draw(self, step: int, count: int) -> list[Sample]:
        """Return `count` demonstrations for a step."""
        return Random(f"{self._seed}/{self._domain}/{step}").choices(self._samples, k=count)


def _source(job: StageJob, domain: str, tokenizer: Tokenizer) -> ConversationStream | GeneratedPool:
    seed, settings = job.settings.seed, job.settings.domains[domain]
    wanted = settings.demonstrations
    if isinstance(wanted, GeneratedDemonstrationSettings):
        prompts = PromptStream(settings.prompts, tokenizer, domain, seed, job.seeded_as)
        samples = [
            response_sample(tokenizer, shown.problem.prompt, shown.response, domain)
            for shown in demonstrations(wanted, prompts, seed)
        ]
        return GeneratedPool(samples, domain, seed)
    order, fraction = seed_of(seed, domain, "demonstrations"), settings.prompts.held_out_fraction
    most = wanted.max_tokens or job.settings.model.max_positions
    return ConversationStream(wanted, tokenizer, domain, order, fraction, most)
