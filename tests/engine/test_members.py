"""The members of an engine with data-parallel attention, as real processes in lockstep."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from parallel.engine.client import EngineClient, EngineError
from parallel.settings import LayoutSettings
from pipeline.launch.placement import ForkServers
from tests.awaiting import wait_until
from tests.engine import members_cases, refit_cases
from tests.engine.drawing import draw, request
from tests.engine.engine_process import Running, running_members
from tests.engine.engine_settings import ENGINE, MODEL
from tests.ranks import On

SETTINGS = ENGINE.model_copy(update={"data": 2, "check_refit": True})
LAYOUT = LayoutSettings(ranks=2, tensor=2)


@pytest.fixture(scope="module")
def members(
    fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Running]]:
    directory = tmp_path_factory.mktemp("engine")
    with running_members(fork_servers, MODEL, directory, SETTINGS) as found:
        yield found


def arguments(members: list[Running], **engine: object) -> tuple[tuple[Path, ...], str, str, str]:
    settings = SETTINGS.model_copy(update=engine)
    described = (MODEL, LAYOUT, settings)
    model, layout, chosen = (each.model_dump_json() for each in described)
    return tuple(each.address for each in members), model, layout, chosen


def clients(members: list[Running]) -> list[EngineClient]:
    made = [EngineClient(each.address, SETTINGS) for each in members]
    for each in made:
        each.connect()
    return made


@pytest.mark.parametrize("transport", ["shared_memory", "messages"])
def test_both_members_have_the_policy_and_serve_alone(
    on: On, members: list[Running], transport: str
) -> None:
    """Each samples while the other has no request; their experts are half on each."""
    for seeds in ([1], [2, 3]):
        found = on(LAYOUT, refit_cases.refit, *arguments(members, transport=transport), seeds)[0]
        assert not found["wrong"]
        assert found["mismatch"] < 1e-4
        assert found["refit_bytes"] == found["bound"]


def test_a_response_does_not_depend_on_the_other_member(on: On, members: list[Running]) -> None:
    on(LAYOUT, refit_cases.refit, *arguments(members), [4])
    first, second = clients(members)
    alone = draw(first, seed=1)
    with ThreadPoolExecutor(2) as pool:
        beside = [
            pool.submit(draw, client, seed=seed) for client, seed in ((first, 1), (second, 7))
        ]
    for one, other in zip(alone, beside[0].result(), strict=True):
        assert np.array_equal(one.response, other.response)
        assert one.logprobs is not None and other.logprobs is not None
        assert np.array_equal(one.logprobs, other.logprobs)


def test_a_refit_between_the_steps_of_one_member(on: On, members: list[Running]) -> None:
    """All tokens have a whole version's weights, although the other member is idle."""
    found = on(LAYOUT, members_cases.refit_in_flight, *arguments(members), [5, 6, 7])[0]
    assert found["versions"] == [5, 6, 7]
    assert found["losses"] == 0
    assert found["mismatch"] < 1e-4


def test_sleep_and_wake_wait_for_both_members(on: On, members: list[Running]) -> None:
    found = on(LAYOUT, members_cases.turn, *arguments(members), 8)[0]
    assert found.pop("mismatch") < 1e-4
    assert found == {"losses": 0, "asleep": [None, None], "awake": [8, 8]}


def test_a_client_that_leaves_aborts_its_requests_alone(on: On, members: list[Running]) -> None:
    on(LAYOUT, refit_cases.refit, *arguments(members), [10])
    first, second = clients(members)
    stream = first.generate(request())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(draw(second)) == len(draw(first)) == len(request().prompts)


def test_members_asked_for_different_things_end(fork_servers: ForkServers, tmp_path: Path) -> None:
    """As after a trainer that died between its calls: a restart is the only way back."""
    with running_members(fork_servers, MODEL, tmp_path, SETTINGS) as found:
        first, second = clients(found)
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(first.sleep), pool.submit(second.wake, members_cases.WEIGHTS)]
        assert all(isinstance(each.exception(), EngineError) for each in asked)
        wait_until(lambda: all(each.process.status() is not None for each in found))
        assert "do not all wait to" in found[0].process.failure().cause


def test_a_member_ends_when_another_is_killed(fork_servers: ForkServers, tmp_path: Path) -> None:
    """The launcher then starts both again: tests.pipeline.test_engines."""
    with running_members(fork_servers, MODEL, tmp_path, SETTINGS) as found:
        found[1].process.send(signal.SIGKILL)
        wait_until(lambda: found[0].process.status() is not None)
        assert "another member of this engine is gone" in found[0].process.failure().cause
