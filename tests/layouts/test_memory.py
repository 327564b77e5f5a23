"""What `braid plan --memory` counts is what the ranks hold."""

from __future__ import annotations

import pytest
from cases import ADAM, MATRIX, MODEL, SGD
from conftest import On
from held import held, kept_for_backward

from parallel.memory import training_memory
from parallel.settings import LayoutSettings, OptimizerSettings

CLOSE = 0.15  # the distributed optimizer's ranks share padding unevenly
TOKENS = 1024


@pytest.mark.parametrize(
    ("optimizer", "distributed"),
    [(ADAM, True), (ADAM, False), (SGD, False)],
    ids=["distributed adam", "adam", "sgd"],
)
@pytest.mark.parametrize("name", MATRIX)
def test_planned_bytes_are_held(
    name: str, optimizer: OptimizerSettings, distributed: bool, on: On
) -> None:
    layout = MATRIX[name].model_copy(update={"distributed_optimizer": distributed})
    planned = training_memory(MODEL, layout, optimizer.algorithm, TOKENS)
    for pipeline_rank, found in on(layout, held, layout, optimizer):
        expected = planned[pipeline_rank]
        assert found.parameters == pytest.approx(expected.parameters, rel=CLOSE)
        assert found.gradients == pytest.approx(expected.gradients, rel=CLOSE)
        assert found.optimizer == pytest.approx(expected.optimizer, rel=CLOSE)


def test_the_estimate_of_activations_is_near(on: On) -> None:
    [(tokens, kept)] = on(LayoutSettings(), kept_for_backward, LayoutSettings(), TOKENS)
    [planned] = training_memory(MODEL, LayoutSettings(), "adam", tokens)
    assert kept == pytest.approx(planned.activations, rel=0.2)
