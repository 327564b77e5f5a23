"""What a domain's demonstrations are like before anything is trained on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from parallel.sample import Sample
from stages.data.conversations import response_sample
from stages.data.demonstrations import demonstrations
from stages.data.problem import DomainError
from stages.data.prompts import PromptStream
from stages.data.sources.conversation_rows import ConversationStream, conversation_index
from stages.data.sources.length_report import PERCENTILES
from stages.data.sources.settings import (
    FileDemonstrationSettings,
    GeneratedDemonstrationSettings,
    ReasoningGymPromptSettings,
)
from stages.data.tokenizer import Tokenizer
from stages.settings import DomainSettings

DRAWN = 2000  # of generated ones: some seconds
EXAMPLES = 2
PURPOSE = "domain check"


@dataclass(frozen=True)
class DemonstrationReport:
    """Counts of rows, and of the distinct usable demonstrations among them that are not held out.

    `too_long` of these have more than `limit` tokens, where there is one; `tokens` maps each of
    PERCENTILES to a demonstration's tokens, and `learned` is the share of all tokens that are
    learned. `examples` are texts, each a prompt and the assistant's first turn.
    """

    rows: int
    bad: int
    duplicates: int
    held_out: int
    usable: int
    limit: int | None
    too_long: int
    tokens: dict[int, int]
    learned: float
    examples: list[tuple[str, str]]


def demonstration_report(
    settings: DomainSettings, tokenizer: Tokenizer, domain: str, positions: int | None
) -> DemonstrationReport | None:
    """Of all rows of the domain's files, or of so many that are generated; None where there are
    none, since prompts of files have none generated.

    `positions` is `model.max_positions`, where the model is known. Reads one row at a time. Raises
    DomainError and TokenizerError as a cold start does.
    """
    wanted = settings.demonstrations
    if isinstance(wanted, FileDemonstrationSettings):
        limit = wanted.max_tokens or positions
        fraction = settings.prompts.held_out_fraction
        stream = ConversationStream(wanted, tokenizer, domain, 0, fraction, limit or 0)
        index = conversation_index(wanted, domain)
        held_out = len(index.keys) - stream.rows
        found = _measured(stream.all(), tokenizer, domain, limit)
        counts = index.counts
        return DemonstrationReport(
            counts.rows, counts.bad, counts.duplicates, held_out, stream.rows, limit, *found
        )
    if not isinstance(settings.prompts, ReasoningGymPromptSettings):
        return None
    generated = _generated(wanted, settings, tokenizer, domain)
    count = min(wanted.count, DRAWN)
    found = _measured(generated, tokenizer, domain, positions)
    return DemonstrationReport(count, 0, 0, 0, count, positions, *found)


def _generated(
    wanted: GeneratedDemonstrationSettings,
    settings: DomainSettings,
    tokenizer: Tokenizer,
    domain: str,
) -> Iterator[Sample]:
    fewer = wanted.model_copy(update={"count": min(wanted.count, DRAWN)})
    prompts = PromptStream(settings.prompts, tokenizer, domain, 0, PURPOSE)
    for shown in demonstrations(fewer, prompts, seed=0):
        yield response_sample(tokenizer, shown.problem.prompt, shown.response, domain)


def _measured(
    samples: Iterator[Sample], tokenizer: Tokenizer, domain: str, limit: int | None
) -> tuple[int, dict[int, int], float, list[tuple[str, str]]]:
    """`too_long`, `tokens`, `learned` and `examples` of a report."""
    first = list(islice(samples, EXAMPLES))
    examples = [(tokenizer.decode(s.prompt), tokenizer.decode(s.response)) for s in first]
    sizes = [
        (len(sample.prompt) + len(sample.response), len(sample.learned), sample.length)
        for sample in chain(first, samples)
    ]
    tokens, learned, read = np.array(sizes).T
    too_long = 0 if limit is None else int((read > limit).sum())
    if too_long == len(sizes):
        raise DomainError(
            domain,
            "demonstrations.max_tokens",
            f"every demonstration is longer than {limit} tokens",
        )
    percentiles = np.percentile(tokens, PERCENTILES, method="higher").tolist()
    spread = dict(zip(PERCENTILES, percentiles, strict=True))
    return too_long, spread, float(learned.sum() / tokens.sum()), examples
