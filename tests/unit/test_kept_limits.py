"""How much an engine is asked to say of the sets that tokens are drawn from."""

from __future__ import annotations

import pytest

from parallel.rollout.core import kept_limits
from parallel.rollout.wire import Sampling


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
def test_as_many_log_probabilities_are_asked_for_as_tokens_may_be_kept(
    top_k: int, top_p: float, vocabulary: int, expected: tuple[int, int]
) -> None:
    sampling = Sampling(1.0, max_tokens=8, end_token=0, top_p=top_p, top_k=top_k)
    assert kept_limits(sampling, vocabulary) == expected
