"""The samples that a stage calibrates on: training prompts of domains, without responses."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from parallel.distributed import broadcast, is_main
from parallel.sample import Sample
from stages.data.prompts import PromptStream
from stages.data.tokenizer import load_tokenizer
from stages.settings import StageJob

CALIBRATION_TOKENS = 8192  # of a rank's forward pass


def calibration_samples(job: StageJob, domains: Iterable[str], prompts: int) -> list[Sample]:
    """Return samples of the first `prompts` prompts of each domain, on every rank. Collective.

    Raises:
        DomainError: a domain has no prompts.
    """
    return broadcast(_samples(job, domains, prompts) if is_main() else None)


def _samples(job: StageJob, domains: Iterable[str], prompts: int) -> list[Sample]:
    tokenizer = load_tokenizer(job.settings.model)
    end = np.array([tokenizer.end_token], np.int32)  # a model reads all but the last token
    samples = []
    for domain in domains:
        stream = PromptStream(
            job.settings.domains[domain].prompts,
            tokenizer,
            domain,
            job.settings.seed,
            f"{job.seeded_as}/calibration",
            longest=job.settings.model.max_positions,
        )
        for problem in stream.take(prompts):
            prompt = np.array(tokenizer.encode(problem.prompt), np.int32)
            samples.append(Sample(domain, prompt, end))
    return samples
