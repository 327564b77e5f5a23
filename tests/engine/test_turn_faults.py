"""Engines that do not sleep or wake as a fleet, or the start of a stage, asks them."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from parallel import distributed
from parallel.engine import arguments, fleet, server
from parallel.engine.client import EngineError, EngineRefused, longest_wait
from parallel.engine.fleet import Fleet, put_to_sleep
from parallel.estimates.engine_memory import engine_share
from parallel.machine.gpus import Gpu
from parallel.settings import EngineJob, EngineSettings, LayoutSettings
from tests.awaiting import PATIENCE_SECONDS
from tests.engine.engine_settings import ENGINE, MODEL

OWN = ENGINE.model_copy(update={"placement": "own"})
GIB = 1 << 30


class Client:
    """A client that records its calls; those in `failing` raise."""

    calls: ClassVar[list[tuple[str, str]]] = []
    failing: ClassVar[dict[tuple[str, str], EngineError]] = {}
    published: ClassVar[set[str]] = set()

    def __init__(self, address: Path, settings: EngineSettings) -> None:
        self.name = address.name
        self.address: Any = None

    def __getattr__(self, method: str) -> Any:
        def call(*given: Any) -> None:
            self.calls.append((self.name, method))
            if error := self.failing.get((self.name, method)):
                raise error

        return call

    def newcomer(self) -> str | None:
        return self.name if self.name in self.published else None


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "EngineClient", Client)
    Client.calls, Client.failing, Client.published = [], {}, set()


def fleet_of(*names: str) -> Fleet:
    made = Fleet([Path(name) for name in names], MODEL, LayoutSettings(), ENGINE)
    made.sleeps = True
    for client in made._clients:
        made.descriptions[client] = made._joined[client] = client.name  # type: ignore[assignment]
    return made


@pytest.mark.usefixtures("one_rank")
def test_an_engine_that_does_not_sleep_is_restarted() -> None:
    Client.failing[("1", "sleep")] = EngineError("engine 1 said nothing")
    engines = fleet_of("0", "1")
    engines.sleep()
    assert [client.name for client in engines.live()] == ["0"]
    assert engines.losses == 1
    assert ("1", "give_up") in Client.calls and ("0", "give_up") not in Client.calls


@pytest.mark.usefixtures("one_rank")
def test_an_engine_whose_cache_finds_no_room_gets_no_requests() -> None:
    """It answers, but vLLM's scheduler would keep its requests for ever."""
    Client.failing[("0", "wake")] = EngineRefused("engine 0 refused wake: out of memory")
    engines = fleet_of("0", "1")
    engines.open_caches()
    assert [client.name for client in engines.live()] == ["1"]


@pytest.mark.usefixtures("one_rank")
def test_engines_of_their_own_never_sleep() -> None:
    engines = fleet_of("0")
    engines.sleeps = False
    engines.open_caches()
    engines.sleep()
    assert Client.calls == []
    assert engines.seconds == 0


def test_only_shared_gpus_are_taken_in_turns() -> None:
    assert ENGINE.sleeps_on("cuda")
    assert not ENGINE.sleeps_on("cpu")
    assert not OWN.sleeps_on("cuda")


def test_a_stage_begins_when_all_its_engines_sleep() -> None:
    """One that is awake since a killed stage and cannot sleep is replaced."""
    Client.failing[("1", "sleep")] = EngineRefused("engine 1 refused sleep")
    put_to_sleep([Path("0"), Path("1")], ENGINE, needed=True)
    first, second = (
        [method for name, method in Client.calls if name == engine] for engine in ("0", "1")
    )
    assert first == ["connect", "sleep"]
    assert second == ["connect", "sleep", "give_up", "connect"]


def test_an_engine_whose_member_does_not_sleep_is_replaced_whole() -> None:
    Client.failing[("1", "sleep")] = EngineRefused("engine 1 refused sleep")
    pairs = ENGINE.model_copy(update={"data": 2})
    put_to_sleep([Path(name) for name in "0123"], pairs, needed=True)
    starts = [name for name, method in Client.calls if method == "connect"]
    assert sorted(starts) == ["0", "0", "1", "1", "2", "3"]
    assert [name for name, method in Client.calls if method == "give_up"] == ["1"]


def test_engines_are_waited_for_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait in a collective, which times out."""
    together = threading.Barrier(3)
    monkeypatch.setattr(Client, "connect", lambda _: together.wait(PATIENCE_SECONDS), raising=False)
    put_to_sleep([Path("0"), Path("1"), Path("2")], ENGINE, needed=True)
    assert sorted(Client.calls) == [("0", "sleep"), ("1", "sleep"), ("2", "sleep")]


def test_collectives_outlast_the_wait_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs a start may take as long as a collective; on CPUs no timeout changes."""
    found = []

    def stop(backend: str, timeout: timedelta, **_: object) -> None:
        found.append(timeout.total_seconds())
        raise InterruptedError

    monkeypatch.setattr(distributed.dist, "init_process_group", stop)
    monkeypatch.setattr(distributed, "_meeting", dict)
    for gpus in (False, True):
        engine = EngineSettings().started_on(gpus)
        with (
            pytest.raises(InterruptedError),
            distributed.process_groups(LayoutSettings(), 0, longest_wait(engine)),
        ):
            pass
        restarted = 2 * (engine.start_seconds + engine.hang_timeout_seconds)
        assert found[-1] > restarted
    assert found == [1800, 4200]


@pytest.mark.usefixtures("one_rank")
def test_the_group_of_objects_has_the_same_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    monkeypatch.setattr(distributed.dist, "new_group", made)
    monkeypatch.setattr(distributed, "backend", lambda: "nccl")
    monkeypatch.setattr(distributed, "_control", None)
    distributed._open_control_group(timedelta(seconds=4200))
    made.assert_called_once_with(backend="gloo", timeout=timedelta(seconds=4200))


def test_a_stage_without_engines_waits_for_none(capfd: pytest.CaptureFixture[str]) -> None:
    Client.published = {"1", "2"}
    Client.failing[("2", "sleep")] = EngineError("engine 2 is gone")
    put_to_sleep([Path("0"), Path("1"), Path("2")], ENGINE, needed=False)
    assert sorted(Client.calls) == [("1", "sleep"), ("2", "sleep")]
    assert "may hold memory: engine 2 is gone" in capfd.readouterr().err


def engine_job(needed: int | None, engine: EngineSettings = ENGINE) -> EngineJob:
    address = Path("address.json")
    return EngineJob(
        model=MODEL, engine=engine, index=0, address=address, seed=0, gpu_memory_bytes=needed
    )


def test_an_engine_starts_when_its_gpus_have_room(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after a restart while the trainer computes."""
    least = engine_share(MODEL, ENGINE).least
    free = [GIB, least - 1, least]  # no more than it needs, though it may use 8 GiB
    assert least < 8 * GIB

    def gpus() -> list[Gpu]:
        here = Gpu(0, "GPU-0", "H100", 80 * GIB, free[0] if len(free) == 1 else free.pop(0), "", "")
        other = Gpu(1, "GPU-1", "H100", 80 * GIB, 0, "", "")  # not the engine's
        return [here, other]

    monkeypatch.setattr(arguments, "visible_gpus", gpus)
    monkeypatch.setattr("parallel.machine.gpus.POLL_SECONDS", 0.001)
    server.wait_for_room(engine_job(8 * GIB))
    assert free == [least]
    hasty = ENGINE.model_copy(update={"start_timeout_seconds": 1})
    free[0] = 2 * GIB
    with pytest.raises(SystemExit):
        server.wait_for_room(engine_job(8 * GIB, hasty))
    said = f"needs {least >> 20} MiB of each GPU, and 2048 MiB were free for 0.1 s of 1 (engine."
    assert said in capfd.readouterr().out
    server.wait_for_room(engine_job(None, hasty))  # no GPU is known
    server.wait_for_room(engine_job(2 * GIB, hasty))  # its start says that it does not fit


def test_an_engine_s_wait_for_room_ends_before_its_start_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[tuple[int, float]] = []

    def wait(free: object, needed: int, seconds: float) -> bool:
        waits.append((needed, seconds))
        return True

    monkeypatch.setattr(server, "wait_for_memory", wait)
    for seconds in (1800, 100, 10):
        changed = ENGINE.model_copy(update={"start_timeout_seconds": seconds})
        server.wait_for_room(engine_job(80 * GIB, changed))
    least = engine_share(MODEL, ENGINE).least
    assert waits == [(least, 1740.0), (least, 40.0), (least, 1.0)]


def test_an_engine_of_its_own_waits_a_little_for_the_process_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def wait(free: object, needed: int, seconds: float) -> bool:
        waits.append(seconds)
        return False  # its start says what is missing

    monkeypatch.setattr(server, "wait_for_memory", wait)
    monkeypatch.setattr(server, "built_for_cpu", lambda: True)
    server.wait_for_room(engine_job(None, OWN))
    assert waits == []
    monkeypatch.setattr(server, "built_for_cpu", lambda: False)
    server.wait_for_room(engine_job(None, OWN.model_copy(update={"start_timeout_seconds": 1800})))
    assert waits == [60.0]
