"""The lengths of what a policy has to write, against `sampling.max_response_tokens`.

Where the right answer is longer than the limit, every response to it is truncated and earns
nothing: no training helps. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from parallel.sample import Sample
from stages.data.tokenizer import Tokenizer, TokenizerError

PERCENTILES = (0, 50, 90, 95, 99, 100)


@dataclass(frozen=True)
class ResponseLengths:
    """Tokens of responses with their end tokens by PERCENTILES, and how many exceed `limit`."""

    checked: int
    limit: int
    too_long: int
    tokens: dict[int, int]


def spread(counts: np.ndarray) -> dict[int, int]:
    """Return the counts [n] by PERCENTILES; each is one of the counts."""
    values = np.percentile(counts, PERCENTILES, method="higher").tolist()
    return dict(zip(PERCENTILES, values, strict=True))


def response_lengths(counts: Iterable[int], limit: int) -> ResponseLengths | None:
    """Return the report on responses of these numbers of tokens; None of no response.

    Example:
        >>> response_lengths([10, 20, 42], limit=32).too_long
        1
    """
    tokens = np.array([*counts], np.int64)
    if not len(tokens):
        return None
    return ResponseLengths(len(tokens), limit, int((tokens > limit).sum()), spread(tokens))


def encoded_lengths(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the tokens of each text, with an end token; none of what the tokenizer cannot write."""
    for text in texts:
        with suppress(TokenizerError):  # the check of the answers names it
            yield len(tokenizer.encode(text)) + 1


def longest_turn(sample: Sample) -> int:
    """Return the tokens of the longest assistant turn of a demonstration: what is sampled at once.

    Example: loss_mask = [1, 1, 0, 0, 1, 1, 1] has turns of 2 and 3 tokens, and the longest is 3.
    """
    learned = sample.learned
    if not len(learned):
        return 0
    ends = np.flatnonzero(np.diff(learned) > 1)
    edges = np.array([-1, *ends, len(learned) - 1])
    return int(np.diff(edges).max())
