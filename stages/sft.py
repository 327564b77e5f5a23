"""Cold start: supervised fine-tuning on every domain's demonstrations at once."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import torch

from parallel import batch
from parallel.distributed import broadcast, is_main, sum_over_data
from parallel.packing import Place
from parallel.policy import TrainedPolicy
from parallel.responses import Responses
from parallel.sample import Sample
from stages.domains.demonstrations import demonstrations
from stages.domains.prompts import PromptStream, held_out_problems
from stages.loop import train
from stages.metrics import token_efficiency
from stages.objectives.aggregation import Totals, token_mean
from stages.settings import StageJob
from stages.tokenizer import CharacterTokenizer


def run(job: StageJob) -> None:
    """Train the cold start to its last step."""
    train(ColdStart(job), job, job.settings.cold_start.loop)


class ColdStart:
    """Cross-entropy of the demonstrations' responses, averaged over all the step's tokens."""

    def __init__(self, job: StageJob) -> None:
        settings = job.settings
        self.settings = settings
        self.policy = TrainedPolicy(
            settings.model,
            settings.layout,
            settings.cold_start.optimizer,
            settings.cold_start.loop.steps,
            settings.cold_start.routing,
        )
        self.pools = broadcast(_demonstrations(job) if is_main() else None)

    def step(self, step: int) -> dict[str, float]:
        samples = [sample for domain in self.pools for sample in self._draw(domain, step)]
        totals = Totals(len(samples), sum(len(sample.response) for sample in samples))
        budget = self.settings.cold_start.loop.micro_batch_tokens
        batches = batch.split(samples, Place.here(), budget, replay=False)

        def cross_entropy(responses: Responses) -> tuple[torch.Tensor, float]:
            loss = token_mean(-responses.log_probs(), responses.batch.mask, totals)
            return loss, loss.item()

        rate = self.policy.learning_rate
        read = sum(sample.length for sample in samples)
        losses = self.policy.accumulate(batches, cross_entropy, read)
        norm = self.policy.step()
        return {
            **sum_over_data({"loss": sum(losses)}),
            **self.policy.routing_metrics(),
            **token_efficiency(batches),
            "gradient_norm": norm,
            "learning_rate": rate,
        }

    def score(self, metrics: dict[str, float]) -> float:
        """A low loss is good."""
        return -metrics["loss"]

    def state(self) -> dict[str, Any]:
        """Nothing: what a step trains on follows from its number."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def _draw(self, domain: str, step: int) -> list[Sample]:
        count = self.settings.experts[domain].demonstrations.sequences_per_step
        random = Random(f"{self.settings.seed}/{domain}/{step}")
        return random.choices(self.pools[domain], k=count)


def _demonstrations(job: StageJob) -> dict[str, list[Sample]]:
    tokenizer = CharacterTokenizer()
    pools = {}
    for domain, settings in job.settings.experts.items():
        # Before hours of training rather than after: is there enough to evaluate on?
        held_out_problems(settings.prompts, domain, job.settings.evaluation.problems)
        prompts = PromptStream(settings.prompts, domain, job.settings.seed, job.stage)
        pools[domain] = [
            Sample(
                domain=domain,
                prompt=np.array(tokenizer.encode(shown.problem.prompt), np.int32),
                response=np.array([*tokenizer.encode(shown.response), tokenizer.end_id], np.int32),
            )
            for shown in demonstrations(settings.demonstrations, prompts, job.settings.seed)
        ]
    return pools
