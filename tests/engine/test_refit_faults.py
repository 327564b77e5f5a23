"""Refits while responses are drawn, and refits that must not happen or must not go unnoticed."""

from __future__ import annotations

from collections import Counter

import engine_cases
import numpy as np
import pytest
from drawing import Reference, as_samples, draw, request
from engine_process import EngineOf, Running
from engine_settings import ENGINE, MODEL, MODELS
from ranks import On

from parallel.rollout.client import EngineClient
from parallel.rollout.wire import Sampling

LAYOUT = engine_cases.LAYOUT
SETTINGS = MODEL.model_dump_json(), ENGINE.model_dump_json()


@pytest.fixture(scope="module")
def engine(engine_of: EngineOf) -> Running:
    return engine_of("qwen3_moe")


def test_responses_go_on_under_new_weights_and_say_which_drew_each_token(
    on: On, engine: Running
) -> None:
    """Whatever drew the prefix, a token's log-probability, and the experts behind it, are those of
    its own version given it."""
    versions = [1, 2, 3]
    sampling = Sampling(temperature=1.0, max_tokens=200, end_token=1)
    [(drawn, weights)] = on(
        LAYOUT, engine_cases.refit_in_flight, engine.address, *SETTINGS, versions, sampling
    )
    references = {version: Reference(MODEL, weights[version]) for version in versions}
    seen: Counter[int] = Counter()
    for each in as_samples(drawn, request(sampling, samples=8), MODEL):
        assert each.versions is not None and each.routes is not None
        assert (np.diff(each.versions) >= 0).all()
        before = len(each.prompt) - 1  # tokens read before the one that the first was drawn from
        expected = references[each.versions[0]].read(each)[1][:before]
        assert np.array_equal(np.sort(each.routes[:before]), expected)
        for version in set(each.versions):
            seen[version] += 1
            drawn_then = each.versions == version
            assert references[version].differences(each)[drawn_then].max() < 1e-4
            expected = references[version].read(each)[1][before:]
            found = np.sort(each.routes[before:])
            assert np.array_equal(found[drawn_then], expected[drawn_then])
    assert set(seen) == set(versions)


def test_an_engine_of_another_model_is_left_as_it_is(on: On, engine: Running) -> None:
    [weights] = on(LAYOUT, engine_cases.refit, engine.address, *SETTINGS, 7)
    other = MODELS["mixtral"].model_dump_json()
    [reason] = on(LAYOUT, engine_cases.refused, engine.address, other, SETTINGS[1])
    assert "was started for another model" in reason
    client = EngineClient(engine.address, ENGINE)
    assert client.connect().weight_version == 7
    assert Reference(MODEL, weights).largest_difference(draw(client)) < 1e-4


def test_a_bit_that_changes_on_its_way_is_found_and_mended(on: On, engine: Running) -> None:
    settings = ENGINE.model_copy(update={"check_refit": True, "transport": "messages"})
    described = MODEL.model_dump_json(), settings.model_dump_json()
    [reason] = on(LAYOUT, engine_cases.refit_corrupted, engine.address, *described)
    name = f"engine {engine.directory.name}"
    assert reason == f"after a refit rank 0 of {name} has other weights than the trainer in layer 1"
    on(LAYOUT, engine_cases.refit, engine.address, *described, 8)
