"""An engine that has slept samples as before once it is awake and has the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from parallel.engine.client import EngineClient, EngineError, EngineRefused
from parallel.engine.wire import Wake
from parallel.sample import Sample
from pipeline.launch.placement import ForkServers
from tests.engine import engine_cases
from tests.engine.drawing import draw, long_request, request
from tests.engine.engine_process import Running, running_engine
from tests.engine.engine_settings import ENGINE, MODELS
from tests.ranks import On
from tests.tiers import tiered

FORGETFUL = "tests.engine.forgetful_engine"  # an engine whose sleep destroys what a GPU's would


@pytest.fixture(scope="module")
def forgetful(
    fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Running]]:
    with ExitStack() as stack:
        yield lambda family: stack.enter_context(
            running_engine(
                fork_servers, MODELS[family], tmp_path_factory.mktemp(family), program=FORGETFUL
            )
        )


def refusal(client: EngineClient) -> str:
    with pytest.raises(EngineRefused) as refused:
        list(client.generate(request()))
    return str(refused.value)


def equal(one: list[Sample], other: list[Sample]) -> bool:
    return all(
        np.array_equal(first.response, second.response)
        and np.array_equal(first.logprobs, second.logprobs)
        and np.array_equal(first.routes, second.routes)
        for first, second in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("family", tiered(MODELS, {"glm4_moe"}))
def test_a_sleep_loses_nothing_that_a_refit_does_not_bring(
    family: str, on: On, forgetful: Callable[[str], Running]
) -> None:
    """Also what is no weight: rotary tables, biases of routers, scales of the cache."""
    model, engine = MODELS[family], forgetful(family)
    client = EngineClient(engine.address, ENGINE)
    client.connect()
    settings = model.model_dump_json(), ENGINE.model_dump_json()
    on(engine_cases.LAYOUT, engine_cases.refit, engine.address, *settings, 1)
    before = draw(client, model=model)
    for _ in range(2):
        client.sleep()
        client.sleep()  # again: nothing happens
        assert client.describe().weight_version is None
        assert client.healthy()
        assert "no weights yet" in refusal(client)
        client.wake(Wake("weights"))
        assert "no weights yet" in refusal(client)
        on(engine_cases.LAYOUT, engine_cases.refit, engine.address, *settings, 1)
        assert "wake its cache first" in refusal(client)
        client.wake(Wake("kv_cache"))
        assert equal(draw(client, model=model), before)


def test_a_sleep_between_weights_and_cache_is_whole(
    on: On, forgetful: Callable[[str], Running]
) -> None:
    """As when a stage is killed in the middle of a turn, and the next one begins."""
    model = MODELS["qwen3_moe"]
    engine = forgetful("qwen3_moe")
    client = EngineClient(engine.address, ENGINE)
    client.connect()
    settings = model.model_dump_json(), ENGINE.model_dump_json()
    on(engine_cases.LAYOUT, engine_cases.refit, engine.address, *settings, 1)
    before = draw(client)
    client.sleep()
    client.wake(Wake("weights"))
    client.sleep()
    stream = on(engine_cases.LAYOUT, engine_cases.turn, engine.address, *settings, 1)
    assert stream == [{"sleeps": True}]
    assert equal(draw(client), before)
    running = client.generate(long_request())
    next(running)
    client.sleep()  # requests in flight end with an error, not with silence
    with pytest.raises(EngineError, match="put to sleep"):
        list(running)
