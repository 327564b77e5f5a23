"""The bytes of `braid plan --memory` equal the bytes that ranks hold."""

from __future__ import annotations

from itertools import product

import pytest

from parallel.estimates.memory import training_memory
from parallel.settings import LayoutSettings, OptimizerSettings
from tests.layouts.cases import ADAM, CORE, MATRIX, MODEL, SGD
from tests.layouts.held import held, kept_for_backward
from tests.layouts.hugging_face_cases import FAMILIES
from tests.ranks import On
from tests.tiers import tiered

CLOSE = 0.15  # the distributed optimizer's ranks share padding unevenly
TOKENS = 1024
OPTIMIZERS: dict[str, tuple[OptimizerSettings, bool]] = {
    "distributed adam": (ADAM, True),
    "adam": (ADAM, False),
    "sgd": (SGD, False),
}


@pytest.mark.parametrize(
    ("name", "how"),
    tiered(
        product(MATRIX, OPTIMIZERS),
        lambda name, how: name in CORE and (how == "distributed adam" or name == "TP2 EP2 PP2"),
    ),
)
def test_planned_bytes_equal_held_bytes(name: str, how: str, on: On) -> None:
    optimizer, distributed = OPTIMIZERS[how]
    layout = MATRIX[name].model_copy(update={"distributed_optimizer": distributed})
    planned = training_memory(MODEL, layout, optimizer, TOKENS)
    for pipeline_rank, found in on(layout, held, layout, optimizer):
        expected = planned[pipeline_rank]
        assert found.parameters == pytest.approx(expected.parameters, rel=CLOSE)
        assert found.gradients == pytest.approx(expected.gradients, rel=CLOSE)
        assert found.optimizer == pytest.approx(expected.optimizer, rel=CLOSE)


@pytest.mark.parametrize("name", tiered(["1 rank", "TP2 EP2 PP2"], {"TP2 EP2 PP2"}))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_counted(family: str, name: str, on: On) -> None:
    model, layout = (
        FAMILIES[family],
        MATRIX[name].model_copy(update={"distributed_optimizer": False}),
    )
    planned = training_memory(model, layout, ADAM, TOKENS)
    for pipeline_rank, found in on(layout, held, layout, ADAM, model):
        assert found.parameters == planned[pipeline_rank].parameters
        assert found.optimizer == planned[pipeline_rank].optimizer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_of_activations_is_near(family: str, on: On) -> None:
    layout, model = LayoutSettings(), FAMILIES[family]
    [(tokens, kept)] = on(layout, kept_for_backward, layout, TOKENS, model)
    [planned] = training_memory(model, layout, ADAM, tokens)
    assert kept == pytest.approx(planned.activations, rel=CLOSE)
