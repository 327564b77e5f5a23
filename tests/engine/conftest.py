"""Real engines, each of which starts once and serves the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from parallel.engine.client import EngineClient, EngineRefused
from pipeline.launch.placement import ForkServers
from tests.engine.drawing import request
from tests.engine.engine_process import EngineOf, Running, running_engine
from tests.engine.engine_settings import ENGINE, MODELS


def refusal(engine: Running) -> str | None:
    """Return the refusal of an engine to sample before its first refit, or None."""
    client = EngineClient(engine.address, ENGINE)
    client.connect()
    try:
        list(client.generate(request()))
    except EngineRefused as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def fork_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """The fork server of this session's engines."""
    with ForkServers(tmp_path_factory.mktemp("fork_servers"), enabled=True) as servers:
        yield servers


@pytest.fixture(scope="session")
def engine_of(
    fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineOf]:
    """Return `engine_of(family, tensor=1)`, an engine of `tensor` ranks with any weights."""
    engines: dict[tuple[str, int], Running] = {}
    with ExitStack() as stack:

        def start(family: str, tensor: int = 1) -> Running:
            if (family, tensor) not in engines:
                directory = tmp_path_factory.mktemp("engine") / f"{family}-TP{tensor}"
                directory.mkdir()
                settings = ENGINE.model_copy(update={"tensor": tensor})
                running = running_engine(fork_servers, MODELS[family], directory, settings)
                engines[family, tensor] = started = stack.enter_context(running)
                started.before_refit = refusal(started)
            return engines[family, tensor]

        yield start


@pytest.fixture(scope="module")
def engine(engine_of: EngineOf) -> Running:
    """An engine of Qwen3-MoE, of one rank."""
    return engine_of("qwen3_moe")
