"""What `braid plan --memory` counts is what the ranks hold."""

from __future__ import annotations

import pytest
from cases import ADAM, MODEL, SGD
from conftest import On
from held import held, kept_for_backward

from parallel.memory import training_memory
from parallel.settings import LayoutSettings, OptimizerSettings

LAYOUTS = {
    "one rank": LayoutSettings(distributed_optimizer=False),
    "EP2": LayoutSettings(ranks=2, expert=2, distributed_optimizer=False),
    "DP2": LayoutSettings(ranks=2, distributed_optimizer=False),
}
CLOSE = 0.15  # the distributed optimizer's ranks share padding unevenly
TOKENS = 1024


@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_planned_bytes_are_held(
    layout: LayoutSettings, optimizer: OptimizerSettings, on: On
) -> None:
    planned = training_memory(MODEL, layout, optimizer.algorithm, TOKENS)
    for pipeline_rank, found in on(layout, held, optimizer):
        expected = planned[pipeline_rank]
        assert found.parameters == pytest.approx(expected.parameters, rel=CLOSE)
        assert found.gradients == pytest.approx(expected.gradients, rel=CLOSE)
        assert found.optimizer == pytest.approx(expected.optimizer, rel=CLOSE)


def test_the_estimate_of_activations_is_near(on: On) -> None:
    [(tokens, kept)] = on(LayoutSettings(), kept_for_backward, TOKENS)
    [planned] = training_memory(MODEL, LayoutSettings(), "adam", tokens)
    assert kept == pytest.approx(planned.activations, rel=0.2)
