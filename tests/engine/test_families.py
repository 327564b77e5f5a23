"""Engines sample from the weights of the families that test_engine.py does not cover."""

from __future__ import annotations

import numpy as np
import pytest

from parallel.engine.client import EngineClient
from parallel.families import routed_layers
from tests.engine import engine_cases
from tests.engine.drawing import DrawingReference, draw
from tests.engine.engine_process import EngineOf
from tests.engine.engine_settings import ENGINE, MODELS
from tests.ranks import On
from tests.tiers import tiered


@pytest.mark.parametrize(
    "family",
    tiered(
        ["mixtral", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "gpt_oss"],
        lambda family: family != "mixtral",
    ),
)
def test_log_probabilities_and_routes_are_those_of_the_model(
    on: On, engine_of: EngineOf, family: str
) -> None:
    # One of two ranks adds the experts' biases of gpt-oss.
    tensor = 2 if family == "gpt_oss" else 1
    settings, address = MODELS[family], engine_of(family, tensor).address
    described = settings.model_dump_json(), ENGINE.model_dump_json()
    [weights] = on(engine_cases.LAYOUT, engine_cases.refit, address, *described, 1)
    assert all(values.std() > 0 for name, values in weights.items() if "bias" in name)
    reference = DrawingReference(settings, weights)
    client = EngineClient(address, ENGINE)
    client.connect()
    for each in draw(client, model=settings):
        assert reference.differences(each).max() < 1e-4
        assert each.routes is not None
        assert each.routes.shape[1] == len(routed_layers(settings))
        assert np.array_equal(np.sort(each.routes), reference.read(each)[1])
