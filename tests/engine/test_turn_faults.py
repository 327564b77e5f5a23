"""Engines that do not sleep or wake as a fleet, or the start of a stage, asks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from parallel.engine import arguments, fleet, server
from parallel.engine.client import EngineError, EngineRefused
from parallel.engine.fleet import Fleet, put_to_sleep
from parallel.gpus import Gpu
from parallel.settings import EngineJob, EngineSettings, LayoutSettings
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
    put_to_sleep([Path("0"), Path("1")], ENGINE, wanted=True)
    first, second = (
        [method for name, method in Client.calls if name == engine] for engine in ("0", "1")
    )
    assert first == ["connect", "sleep"]
    assert second == ["connect", "sleep", "give_up", "connect"]


def test_a_stage_without_engines_waits_for_none(capfd: pytest.CaptureFixture[str]) -> None:
    Client.published = {"1", "2"}
    Client.failing[("2", "sleep")] = EngineError("engine 2 is gone")
    put_to_sleep([Path("0"), Path("1"), Path("2")], ENGINE, wanted=False)
    assert Client.calls == [("1", "sleep"), ("2", "sleep")]
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
    free = [GIB, GIB, 9 * GIB]

    def gpus() -> list[Gpu]:
        here = Gpu(0, "GPU-0", "H100", 80 * GIB, free[0] if len(free) == 1 else free.pop(0), "", "")
        other = Gpu(1, "GPU-1", "H100", 80 * GIB, 0, "", "")  # not the engine's
        return [here, other]

    monkeypatch.setattr(arguments, "visible_gpus", gpus)
    monkeypatch.setattr("parallel.gpus.POLL_SECONDS", 0.001)
    server.wait_for_room(engine_job(8 * GIB))
    assert free == [9 * GIB]
    hasty = ENGINE.model_copy(update={"start_timeout_seconds": 0})
    with pytest.raises(SystemExit):
        server.wait_for_room(engine_job(10 * GIB, hasty))
    assert "needs 10240 MiB of each GPU, and 9216 MiB were free" in capfd.readouterr().out
    for settings in (engine_job(None, hasty), engine_job(10 * GIB, OWN)):
        server.wait_for_room(settings)
