"""The roofline: published steps, and what must grow or shrink with what."""

from __future__ import annotations

import pytest

from parallel.roofline.hardware import GPUS, REACHED
from parallel.roofline.training import training_seconds
from parallel.roofline.work import StepWorkload
from parallel.settings import LayoutSettings
from tests.layouts.real_models import QWEN3_30B
from tests.parallel.published_steps import H100

WORK = StepWorkload(64, mean_tokens=4096, most_tokens=4096, micro_batch_tokens=4096)

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


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_pipeline_is_filled_before_all_ranks_work(virtual: int) -> None:
    """1F1B idles for (p - 1) / v micro-batches (arXiv 2104.04473)."""
    layout = LayoutSettings(ranks=4, pipeline=4, virtual_pipeline=virtual)
    *_, bubble = training_seconds(QWEN3_30B, layout, WORK, GPUS["h100"], REACHED)
    assert bubble == pytest.approx(3 / virtual / (64 + 3 / virtual))


def test_experts_on_several_nodes_wait_for_the_network() -> None:
    near, far = (
        training_seconds(
            QWEN3_30B, LayoutSettings(ranks=16, expert=expert), WORK, GPUS["h100"], REACHED
        )[1]
        for expert in (8, 16)
    )
    assert far > 1.05 * near
