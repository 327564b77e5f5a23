"""Preference optimisation: DPO and IPO on pairs of a chosen and a rejected response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from parallel import batch
from parallel.batch import MicroBatch, RankPlace, Responses
from parallel.distributed import broadcast, is_main, sum_over_data
from parallel.model.policy import TrainedPolicy
from parallel.sample import Sample
from stages.data.problem import seed_of
from stages.data.tokenizer import Tokenizer
from stages.kinds.dpo.pairs import CollectedPairs, DrawnPair, FilePairs, PairRows, PairStream
from stages.kinds.dpo.reference_logprobs import ReferenceLogprobs, samples_of, sequence_logprobs
from stages.kinds.dpo.settings import REFERENCE, BestWorstPairSettings, DpoSettings
from stages.kinds.mixture_stage import MixtureStage, collected
from stages.loop import train
from stages.objectives.preference import PairLogprobs, PreferenceBase, preference_loss
from stages.settings import StageJob

Both = tuple[float, float]  # log-probabilities of a pair's two responses under the reference


def run(job: StageJob) -> None:
    """Train on preference pairs to the stage's last step."""
    stage = Dpo(job)
    train(stage, job, stage.block_settings.loop)


class Dpo(MixtureStage[DrawnPair]):
    """The stage that minimises a loss of pairs, averaged over the pairs of each step.

    A pair is in one micro-batch, since its loss needs both responses; its gradient is divided by
    the step's number of pairs, so that it depends on neither layout nor packing.
    """

    def __init__(self, job: StageJob) -> None:
        assert isinstance(job.block_settings, DpoSettings)
        super().__init__(job, job.block_settings)
        self.block_settings = settings = job.block_settings
        streams: dict[str, PairStream] = {}
        if is_main():
            streams = {name: _stream(job, settings, name, self.tokenizer) for name in settings.data}
            self.sources = {**streams}
        origin = job.models.get(REFERENCE, job.parent)
        assert origin is not None
        self.reference = ReferenceLogprobs(job, settings, streams, origin)
        self.policy = TrainedPolicy(
            job.settings.model,
            job.settings.layout,
            settings.optimizer,
            settings.loop.steps,
            settings.routing,
        )

    def step(self, step: int) -> dict[str, float]:
        pairs, reference, too_long = broadcast(self._draw(step) if is_main() else None)
        samples, budget = samples_of(pairs), self.block_settings.loop.micro_batch_tokens
        batches = batch.split(samples, RankPlace.here(), budget, replay=False, together=2)
        sums = accumulate(self.policy, batches, samples, reference, self.block_settings.loss)
        rows = [pair.row for pair in pairs for _ in range(2)]
        return {**sums, "too_long": too_long, **self.finish_step(step, batches, samples, rows)}

    def _draw(self, step: int) -> tuple[list[DrawnPair], list[Both], float]:
        """Return a step's pairs, their reference, and the number skipped as too long."""
        pairs, too_long = self.draw(step)
        return pairs, [self.reference.of(pair) for pair in pairs], too_long


def accumulate(
    policy: TrainedPolicy,
    batches: list[MicroBatch],
    samples: Sequence[Sample],
    reference: Sequence[Both],
    settings: PreferenceBase,
) -> dict[str, float]:
    """Accumulate the gradients of a step's pairs; return the loss and the rewards. Collective.

    `samples` are of all ranks, and `reference` is by their pairs' numbers.
    """
    count = len(reference)

    def loss(responses: Responses) -> tuple[torch.Tensor, dict[str, float]]:
        micro_batch = responses.batch
        logprobs, tokens = sequence_logprobs(responses), micro_batch.mask.sum(-1)
        of = [reference[sample.group] for sample in micro_batch.samples[::2]]
        reference_logprobs = logprobs.new_tensor(of).view(-1, 2)
        pairs = PairLogprobs(
            *(
                logprobs[::2],
                logprobs[1::2],
                reference_logprobs[:, 0],
                reference_logprobs[:, 1],
                tokens[::2],
                tokens[1::2],
            )
        )
        preference = preference_loss(pairs, count, settings)
        return preference.loss.float(), preference.sums

    read = sum(sample.length for sample in samples)
    sums = Counter(dict.fromkeys(METRICS, 0.0))
    for batch_sums in policy.accumulate(batches, loss, read):
        sums.update(batch_sums)
    return {name: value / count for name, value in sum_over_data(dict(sums)).items()}


METRICS = ("loss", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


def _stream(job: StageJob, settings: DpoSettings, name: str, tokenizer: Tokenizer) -> PairStream:
    """Return the stream of a source, without the prompts that the run's domains hold out."""
    key, source = f"stages.{job.block}.data.{name}", settings.data[name]
    # The same in every domain, since the split is by text.
    fraction = next(iter(job.settings.domains.values())).prompts.held_out_fraction
    rows: PairRows
    if isinstance(source, BestWorstPairSettings):
        rows = CollectedPairs(collected(job, name), key, fraction)
    else:
        columns = (source.prompt, source.chosen, source.rejected)
        rows = FilePairs(source, columns, key, fraction)
    order = seed_of(job.settings.seed, job.seeded_as, name, "pairs")
    most = source.max_tokens or job.settings.model.max_positions
    return PairStream(name, rows, tokenizer, order, most, key)
