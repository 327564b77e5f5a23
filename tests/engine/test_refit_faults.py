"""Refits while responses are sampled, and refits that must fail or be noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from parallel.engine.client import EngineClient
from parallel.engine.wire import Sampling
from pipeline.launch.placement import ForkServers
from tests.engine import engine_cases
from tests.engine.drawing import DrawingReference, as_samples, draw, request
from tests.engine.engine_process import Running, running_engine
from tests.engine.engine_settings import ENGINE, MODEL, MODELS
from tests.ranks import On

LAYOUT = engine_cases.LAYOUT
SETTINGS = MODEL.model_dump_json(), ENGINE.model_dump_json()


@pytest.fixture(params=["stepwise", "asynchronous"])
def scheduled(
    request: pytest.FixtureRequest, fork_servers: ForkServers, tmp_path: Path
) -> Iterator[Running]:
    """An engine as on a CPU, and one whose next step is scheduled while one runs, as on a GPU."""
    if request.param == "stepwise":
        yield request.getfixturevalue("engine")
        return
    program = "tests.engine.asynchronous_engine"
    with running_engine(fork_servers, MODEL, tmp_path, program=program) as engine:
        yield engine


def test_responses_continue_under_new_weights_with_each_token_s_version(
    on: On, scheduled: Running
) -> None:
    """A token's log-probability and experts belong to its weight version, given its prefix.

    The steps between which a refit falls depend on the machine: every run samples other tokens,
    sometimes one whose experts depend on rounding.
    """
    versions = [1, 2, 3]
    sampling = Sampling(temperature=1.0, max_tokens=200, end_tokens=(1,))
    [(drawn, weights)] = on(
        LAYOUT, engine_cases.refit_in_flight, scheduled.address, *SETTINGS, versions, sampling
    )
    references = {version: DrawingReference(MODEL, weights[version]) for version in versions}
    seen: Counter[int] = Counter()
    held = prompts = 0
    for each in as_samples(drawn, request(sampling), MODEL):
        assert each.versions is not None and each.routes is not None
        assert (np.diff(each.versions) >= 0).all()
        before = len(each.prompt) - 1  # tokens read before the one that the first was drawn from
        found = np.sort(each.routes)
        first = references[each.versions[0]]
        if first.certain(each)[0]:
            prompts += 1
            assert np.array_equal(found[:before], first.read(each)[1][:before])
        for version in set(each.versions):
            reference = references[version]
            compared = (each.versions == version) & reference.certain(each)
            seen[version] += (each.versions == version).sum()
            held += compared.sum()
            expected = reference.read(each)[1]
            assert np.array_equal(found[before:][compared], expected[before:][compared])
            assert reference.differences(each)[compared].max(initial=0) < 1e-4
    # Two responses that end in one step bring two refits with no step between them.
    assert {versions[0], versions[-1]} <= set(seen)
    assert prompts > 0
    assert held > seen.total() / 2


def test_an_engine_of_another_model_is_left_as_it_is(on: On, engine: Running) -> None:
    [weights] = on(LAYOUT, engine_cases.refit, engine.address, *SETTINGS, 7)
    other = MODELS["mixtral"].model_dump_json()
    [reason] = on(LAYOUT, engine_cases.refused, engine.address, other, SETTINGS[1])
    assert "was started for another model" in reason
    client = EngineClient(engine.address, ENGINE)
    assert client.connect().weight_version == 7
    assert DrawingReference(MODEL, weights).largest_difference(draw(client)) < 1e-4


def test_a_bit_flipped_in_transfer_is_found_and_fixed(on: On, engine: Running) -> None:
    settings = ENGINE.model_copy(update={"check_refit": True, "transport": "messages"})
    described = MODEL.model_dump_json(), settings.model_dump_json()
    [reason] = on(LAYOUT, engine_cases.refit_corrupted, engine.address, *described)
    name = f"engine {engine.directory.name}"
    assert reason == f"after a refit rank 0 of {name} has other weights than the trainer in layer 1"
    on(LAYOUT, engine_cases.refit, engine.address, *described, 8)
