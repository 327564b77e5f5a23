"""The steps in flight at a refit, on a real engine that schedules asynchronously."""

from __future__ import annotations

from pathlib import Path

from parallel.settings import EngineJob
from pipeline.launch.placement import ForkServers
from tests.engine.engine_process import call
from tests.engine.engine_settings import ENGINE, MODEL


def test_a_drain_leaves_no_step_half_done_and_loses_no_response(
    fork_servers: ForkServers, tmp_path: Path
) -> None:
    before, after, ended, later = call(fork_servers, drained, tmp_path)
    assert before == [(3, 1), (3, 1)]
    assert after == [(4, 0)]  # the other request has ended in the drain
    assert ended == [4]
    assert later == [20]


def test_a_sleep_leaves_no_step_in_flight(fork_servers: ForkServers, tmp_path: Path) -> None:
    """A GPU would still compute with the memory that it frees."""
    before, after = call(fork_servers, slept, tmp_path)
    assert before and not after


def slept() -> tuple[int, int]:
    """Return the steps in flight before a sleep, and after it."""
    from parallel.engine.core import Core
    from parallel.engine.wire import Generate, Prompt, Sampling
    from tests.engine import asynchronous_engine

    asynchronous_engine.install()
    core = Core(EngineJob(model=MODEL, engine=ENGINE, index=0, address=Path("unused"), seed=0))
    core.prepare()
    core.weight_version = 1
    sampling = Sampling(1.0, max_tokens=20, end_tokens=(MODEL.vocabulary_size - 1,))
    core.admit(Generate([Prompt(0, [3, 4, 5], seed=0)], sampling))
    core.step()
    in_flight = core._vllm.engine_core.engine_core.batch_queue
    before = len(in_flight)
    core.sleep()
    return before, len(in_flight)


def drained() -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[int], list[int]]:
    """Drain while a step is in flight that ends one of two requests.

    Returns (sampled, in flight) tokens of every request before and after; the lengths of the
    responses that the next step returns, and of those after it.
    """
    from parallel.engine.core import Core
    from parallel.engine.wire import Generate, Generation, Prompt, Sampling
    from tests.engine import asynchronous_engine

    asynchronous_engine.install()
    core = Core(EngineJob(model=MODEL, engine=ENGINE, index=0, address=Path("unused"), seed=0))
    core.prepare()
    core.weight_version = 1
    for tokens in (4, 20):
        sampling = Sampling(1.0, max_tokens=tokens, end_tokens=(MODEL.vocabulary_size - 1,))
        core.admit(Generate([Prompt(0, [3, 4, 5], seed=tokens)], sampling))
    inside = core._vllm.engine_core.engine_core

    def progress() -> list[tuple[int, int]]:
        requests = inside.scheduler.requests.values()
        return [(each.num_output_tokens, each.num_output_placeholders) for each in requests]

    def lengths(found: list[tuple[str, Generation]]) -> list[int]:
        return [len(each.tokens) // 4 for _, each in found]

    for _ in range(4):
        assert not core.step()
    before = progress()
    core.drain()
    after, ended = progress(), lengths(core.step())
    found: list[int] = []
    while core._requests:
        found += lengths(core.step())
    assert not core.step()
    return before, after, ended, found
