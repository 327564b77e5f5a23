"""The roofline: published steps, and what must grow or shrink with what."""

from __future__ import annotations

import pytest

from parallel.roofline.hardware import REACHED
from tests.parallel.published_steps import H100

WITHIN = 0.25
NAMED = ("30B on 32", "235B on 128", "671B on 256")  # whose throughputs are Braid's aim


@pytest.mark.parametrize("name", H100)
def test_a_published_step_takes_as_long(name: str) -> None:
    published = H100[name]
    assert published.simulated(REACHED).total == pytest.approx(published.seconds, rel=WITHIN)


@pytest.mark.parametrize("name", NAMED)
def test_a_published_throughput_is_reached(name: str) -> None:
    """Not of all: the tokens a second of asynchronous 671B are not its tokens over its seconds."""
    published = H100[name]
    seconds = published.simulated(REACHED).total
    tokens = published.sequences * published.mean / seconds / published.gpus
    assert tokens == pytest.approx(published.tokens_per_second, rel=WITHIN)
