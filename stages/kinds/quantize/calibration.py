"""The samples of domains that a stage calibrates on, none of them held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from parallel import batch
from parallel.batch import MicroBatch, RankPlace
from parallel.distributed import broadcast, is_main
from parallel.sample import Sample
from stages.data.prompts import PromptStream
from stages.data.tokenizer import Tokenizer, load_tokenizer
from stages.kinds.mixture_stage import demonstrated
from stages.settings import StageJob

BATCH_TOKENS = 8192  # of a rank's forward pass


def calibration_samples(
    job: StageJob, domains: Iterable[str], count: int, *, responses: bool = False
) -> list[Sample]:
    """Return `count` training prompts of each domain as samples, on every rank. Collective.

    With `responses` they are demonstrations of the domain instead.

    Raises:
        DomainError: a domain has none.
    """

    def samples() -> Iterator[Sample]:
        tokenizer = load_tokenizer(job.settings.model)
        for domain in domains:
            if responses:
                yield from demonstrated(job, domain, tokenizer).draw(0, count)
            else:
                yield from _prompts(job, domain, tokenizer, count)

    return broadcast([*samples()] if is_main() else None)


def calibration_batches(samples: Sequence[Sample]) -> list[MicroBatch]:
    """Return this rank's micro-batches of samples."""
    return batch.split(samples, RankPlace.here(), BATCH_TOKENS, replay=False)


def _prompts(job: StageJob, domain: str, tokenizer: Tokenizer, count: int) -> Iterator[Sample]:
    end = np.array([tokenizer.end_token], np.int32)  # a model reads all but the last token
    stream = PromptStream(
        job.settings.domains[domain].prompts,
        tokenizer,
        domain,
        job.settings.seed,
        f"{job.seeded_as}/calibration",
        longest=job.settings.model.max_positions,
    )
    for problem in stream.take(count):
        yield Sample(domain, np.array(tokenizer.encode(problem.prompt), np.int32), end)
