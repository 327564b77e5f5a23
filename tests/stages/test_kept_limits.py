"""The limits on the kept-token sets that an engine is asked to return."""

from __future__ import annotations

import numpy as np
import pytest

from parallel.engine.wire import kept_limits
from parallel.sample import Sample
from stages.domains import SamplingSettings
from stages.metrics import saturated


@pytest.mark.parametrize(
    ("top_k", "top_p", "vocabulary", "expected"),
    [
        (20, 1.0, 151_936, (20, 84)),  # bf16 logits have ties, all of which vLLM keeps
        (20, 0.9, 80, (20, 80)),
        (0, 0.9, 151_936, (4096, 4160)),
        (0, 0.9, 80, (0, 80)),
        (0, 1.0, 151_936, (0, 0)),
    ],
)
def test_log_probabilities_are_requested_for_every_token_that_may_be_kept(
    top_k: int, top_p: float, vocabulary: int, expected: tuple[int, int]
) -> None:
    assert kept_limits(top_k, top_p, vocabulary) == expected


def test_sets_of_the_requested_size_are_counted() -> None:
    """They may have been larger: 20 and 64 ties."""
    sizes = [20, 84, 83, 21]
    sample = Sample("a", np.arange(3), np.arange(4), kept=[np.arange(size) for size in sizes])
    settings = SamplingSettings(top_k=20)
    assert saturated([sample], settings, 151_936) == {"kept_saturated": 0.25}
    assert saturated([sample], settings, 84) == {"kept_saturated": 0.0}  # all there is
    assert saturated([sample], SamplingSettings(), 151_936) == {}
