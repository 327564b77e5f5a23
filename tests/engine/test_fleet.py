"""The trainer's end of a refit against engines in this process: asynchrony, loss, moved memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel.engine import fleet, refit_extension
from parallel.engine.client import EngineError
from parallel.engine.fleet import AllLost, Fleet
from parallel.engine.refit_extension import RefitExtension
from parallel.engine.wire import (
    PROTOCOL,
    EngineDescription,
    EnginePlace,
    Join,
    RankReport,
    Refit,
    Refitted,
    Wake,
    model_digest,
)
from parallel.settings import EngineSettings, LayoutSettings
from parallel.weights.boxes import Box
from parallel.weights.executor import Inbox
from parallel.weights.mapping import host_identity
from parallel.weights.needs import needed
from parallel.weights.planner import EngineSizes, Hosts, Plan
from tests.parallel.nccl_double import LateNetwork
from tests.parallel.test_messages import held
from tests.parallel.test_weight_plan import at, model, numbered

MODEL, LAYOUT, CPU = model("mixtral"), LayoutSettings(), torch.device("cpu")
Weights = dict[str, torch.Tensor]


class LateDevice:
    """A device that does what was enqueued when somebody synchronises, and not before."""

    def __init__(self) -> None:
        self.enqueued: list[Callable[[], Any]] = []

    def synchronize(self, where: torch.device) -> None:
        while self.enqueued:
            self.enqueued.pop(0)()


class TrainedWeights:
    """A policy as far as a refit reads it."""

    def __init__(self) -> None:
        self.allocate()

    def allocate(self) -> None:
        """Put the weights into other memory, as a trainer does that offloads them."""
        [self.weights] = held(MODEL, LAYOUT)

    def named_weights(self) -> Weights:
        return self.weights

    def add(self, value: float) -> None:
        for tensor in self.weights.values():
            tensor += value


class InProcessEngine:
    """An EngineClient and its engine of one rank; with `dies`, it dies in its first refit."""

    dies = False

    def __init__(self, address: Path, settings: EngineSettings) -> None:
        self.name, self.instance, self.requests = "engine 0", 0, list[Refit]()
        self.loaded: Weights = {}

    def newcomer(self) -> bool:
        return False

    def connect(self) -> EngineDescription:
        self.instance += 1
        places = [EnginePlace(host_identity(), [])]
        digest = model_digest(MODEL)
        return EngineDescription(
            PROTOCOL, f"{self.instance}", places, digest, 1, False, 64, 4, None
        )

    def wake(self, part: Wake) -> None:
        assert part == Wake("weights")

    def give_up(self, reason: str) -> None:
        self.reason = reason

    def join(self, join: Join) -> None:
        join = msgspec.msgpack.decode(msgspec.msgpack.encode(join), type=Join)
        hosts = Hosts(*map(tuple, join.hosts)) if join.hosts else None
        plan = Plan(MODEL, LAYOUT, EngineSizes(tuple(join.fleet), hosts=hosts))
        self.inbox = Inbox(MODEL, LAYOUT, plan, 0, join.meetings, CPU)

    def refit(self, asked: Refit) -> Refitted:
        if self.dies and self.instance == 1:
            time.sleep(0.2)
            raise EngineError("engine 0 broke off its answer to refit")
        asked = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Refit)
        self.requests.append(asked)
        if asked.shared:
            self.inbox.map(asked.shared)
        self.loaded = {
            name: contents.clone()
            for bucket in self.inbox.buckets
            for (name, _), contents in self.inbox.take(bucket).items()
        }
        if asked.release:
            self.inbox.unmap()
        return Refitted([RankReport(0, 0, {})])


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def connected(transport: str, dies: bool = False) -> tuple[Fleet, InProcessEngine]:
    settings = EngineSettings(transport=transport)
    with mock.patch.object(fleet, "EngineClient", InProcessEngine):
        found = Fleet([Path("engine")], MODEL, LAYOUT, settings)
    [engine] = found._clients
    assert isinstance(engine, InProcessEngine)
    engine.dies = dies
    return found, engine


def check(loaded: Weights, added: float) -> None:
    whole = numbered(MODEL)
    for name, box in needed(MODEL, 1, 0):
        assert np.array_equal(loaded[name].numpy(), whole[name][at(box)] + added), name


def test_engines_read_what_the_last_step_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's last writes are enqueued when a refit begins."""
    late, policy = LateDevice(), TrainedWeights()
    monkeypatch.setattr(fleet, "synchronize", late.synchronize)
    engines, engine = connected("shared_memory")
    for step in (1, 2):
        late.enqueued.append(lambda: policy.add(1.0))
        engines.refit(policy, step)  # type: ignore[arg-type]
        check(engine.loaded, step)


class LateExtension(RefitExtension):
    """The refit of vLLM's worker, whose loaders only enqueue their copies."""

    def __init__(self, inbox: Inbox, late: LateDevice) -> None:
        self._inbox, self._device, self.late = inbox, CPU, late
        self.loaded: Weights = {}

    def _bracket(self) -> Any:
        return nullcontext()

    def _load(self, each: Any, contents: dict[tuple[str, Box], torch.Tensor], landed: Any) -> None:
        for (name, _), view in contents.items():
            self.loaded[name] = torch.full(view.shape, -1.0)
            self.late.enqueued.append(lambda to=self.loaded[name], view=view: to.copy_(view))


def test_an_engine_answers_when_its_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's next step changes the memory that the copies read."""
    late, policy = LateDevice(), TrainedWeights()
    monkeypatch.setattr(refit_extension, "synchronize", late.synchronize)
    plan = Plan(MODEL, LAYOUT, EngineSizes((1,), hosts=Hosts((0,), (0,))))
    extension = LateExtension(Inbox(MODEL, LAYOUT, plan, 0, [], CPU), late)
    shared = {0: fleet.share(policy.named_weights())}
    extension.refit(msgspec.msgpack.encode(Refit(1, check=False, shared=shared)))
    policy.add(1.0)
    late.synchronize(CPU)
    check(extension.loaded, 0.0)


def test_an_engine_that_dies_in_a_refit_over_nccl_is_replaced() -> None:
    """Sends to it never end and raise nothing; the refit is repeated with the next engine."""
    network, policy = LateNetwork(dead=frozenset({1})), TrainedWeights()
    engines, engine = connected("messages", dies=True)
    connect = engine.connect

    def revived() -> EngineDescription:
        if engine.instance:
            network.dead = frozenset()
        return connect()

    start = time.monotonic()
    with network.patched(), mock.patch.object(engine, "connect", revived):
        engines.refit(policy, 1)  # type: ignore[arg-type]
    assert time.monotonic() - start < fleet.JOIN_SECONDS / 4
    check(engine.loaded, 0.0)
    assert engine.reason == "engine 0 broke off its answer to refit"
    assert engines.losses == 1
    assert 0 in network.aborted


def test_memory_is_shared_again_where_it_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that offloads its weights allocates them again; others are mapped once."""
    policy = TrainedWeights()
    engines, engine = connected("auto")
    for step in (1, 2):
        engines.refit(policy, step)  # type: ignore[arg-type]
    kept = policy.weights  # so that the next memory is other memory
    policy.allocate()
    policy.add(5.0)
    engines.refit(policy, 3)  # type: ignore[arg-type]
    check(engine.loaded, 5.0)
    assert kept is not policy.weights
    assert [bool(asked.shared) for asked in engine.requests] == [True, False, True]
    assert not any(asked.release for asked in engine.requests)
    monkeypatch.setattr(engines, "sleeps", True)  # as on GPUs that engines and trainer share
    for step in (4, 5):
        engines.refit(policy, step)  # type: ignore[arg-type]
        check(engine.loaded, 5.0)
        assert engine.requests[-1].release
        assert engine.requests[-1].shared
        assert not engine.inbox._memory


def test_the_start_of_an_engine_is_measured_apart_from_later_refits() -> None:
    policy = TrainedWeights()
    engines, engine = connected("auto")
    connect = engine.connect

    def slow() -> EngineDescription:
        time.sleep(0.2)
        return connect()

    with mock.patch.object(engine, "connect", slow):
        engines.refit(policy, 1)  # type: ignore[arg-type]
        started = engines.start_seconds
        engines.refit(policy, 2)  # type: ignore[arg-type]
    assert engines.start_seconds == started >= 0.2


def test_an_engine_that_needs_the_trainers_memory_is_awaited_before_a_refit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the first start nor a restart ends while the trainer's weights are on the device."""
    policy, beside = TrainedWeights(), [True]
    engines, engine = connected("auto", dies=True)
    connect = engine.connect

    def start() -> EngineDescription:
        assert not any(beside), "the engine waits for the trainer, which waits for the engine"
        return connect()

    monkeypatch.setattr(engine, "connect", start)
    monkeypatch.setattr(engines, "sleeps", True)
    for version in (1, 2):
        engines.await_engines(beside.clear)
        assert not beside
        beside.append(True)
        if version == 1:
            with pytest.raises(AllLost):
                engines.refit(policy, version)  # type: ignore[arg-type]
            assert engine.reason == "engine 0 broke off its answer to refit"
    engines.refit(policy, 2)  # type: ignore[arg-type]
    check(engine.loaded, 0.0)
    engines.await_engines(lambda: pytest.fail("no engine is awaited, and the weights move"))


def test_engines_beside_the_trainer_are_awaited_by_a_refit() -> None:
    """As on a CPU: one of two waits is enough."""
    engines, engine = connected("auto")
    engines.await_engines(lambda: pytest.fail("nothing moves"))
    assert engine.instance == 0
    engines.refit(TrainedWeights(), 1)  # type: ignore[arg-type]
    assert engine.instance == 1
