"""Refits over a transport that enqueues as NCCL does, and over mapped memory mixed with it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from parallel.distributed import host_store
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights import executor, planner
from parallel.weights.boxes import Box
from parallel.weights.executor import IN_FLIGHT, Inbox, Outbox
from parallel.weights.mapping import share
from parallel.weights.needs import needed
from parallel.weights.planner import EngineSizes, Hosts, Plan
from parallel.weights.transport import LOST, Meeting
from tests.awaiting import PATIENCE_SECONDS
from tests.parallel.nccl_double import LateNetwork, LateWork
from tests.parallel.test_weight_plan import at, layouts, model, numbered, parameters
from tests.tiers import tiered

CPU = torch.device("cpu")
SECONDS = float(PATIENCE_SECONDS)
Loaded = dict[tuple[str, Box], torch.Tensor]  # the contents of an engine rank's boxes


def held(settings: ModelSettings, layout: LayoutSettings) -> list[dict[str, torch.Tensor]]:
    """Return every trainer rank's parameters."""
    whole = numbered(settings)
    ranks = [parameters(settings, layout, rank, whole) for rank in range(layout.ranks)]
    return [
        {
            f"{chunk}/{name}": torch.from_numpy(value).float()
            for (chunk, name), value in rank.items()
        }
        for rank in ranks
    ]


class GlooNetwork:
    """Real gloo groups, whose ranks are threads here."""

    def patched(self) -> Any:
        return nullcontext()

    def meeting(self, ranks: int) -> Meeting:
        self.store = host_store("127.0.0.1", 0, timedelta(seconds=SECONDS))
        return Meeting("127.0.0.1", self.store.port, "", list(range(ranks)), SECONDS)


def refit(
    settings: ModelSettings,
    layout: LayoutSettings,
    fleet: EngineSizes,
    network: LateNetwork | GlooNetwork,
) -> tuple[list[Loaded], list[Inbox]]:
    """Run all ranks' ends in threads; return what each engine rank has, and its inbox."""
    weights, ranks = held(settings, layout), sum(fleet.engines)
    plan, meeting = Plan(settings, layout, fleet), network.meeting(layout.ranks + ranks)
    shared = {rank: share(each) for rank, each in enumerate(weights)} if fleet.hosts else {}
    loaded: list[Loaded] = [{} for _ in range(ranks)]
    inboxes: list[Any] = [None] * ranks
    failures: list[BaseException] = []

    def send(rank: int) -> None:
        Outbox(plan, rank, weights[rank], [meeting], CPU).send()

    def take(rank: int) -> None:
        inboxes[rank] = inbox = Inbox(settings, layout, plan, rank, [meeting], CPU)
        inbox.map(shared)
        for bucket in inbox.buckets:
            for need, contents in inbox.take(bucket).items():
                loaded[rank][need] = contents.clone()
        inbox.close()

    def run(end: Callable[[int], None], rank: int) -> None:
        try:
            end(rank)
        except BaseException as error:
            failures.append(error)
            raise

    with network.patched():
        threads = [threading.Thread(target=run, args=(send, rank)) for rank in range(layout.ranks)]
        threads += [threading.Thread(target=run, args=(take, rank)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    return loaded, inboxes


def check(settings: ModelSettings, fleet: EngineSizes, loaded: list[Loaded]) -> None:
    whole, rank = numbered(settings), 0
    for size in fleet.engines:
        for place in range(size):
            for name, box in needed(settings, size, place, fleet.expert_parallel):
                assert np.array_equal(loaded[rank][name, box].numpy(), whole[name][at(box)])
            rank += 1


@pytest.mark.parametrize("seed", tiered(range(24), range(6)))
def test_ranks_whose_batches_run_one_after_another_meet(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random layouts, engines and hosts: no deadlock, and all bits.

    A batch has few peers, since NCCL runs many on one channel one after another.
    """
    monkeypatch.setattr(planner, "GRAIN", 64)
    settings, (layout, fleet) = model("qwen3_moe"), layouts(seed)
    network = LateNetwork()
    loaded, _ = refit(settings, layout, fleet, network)
    check(settings, fleet, loaded)
    dtypes = 2
    engines = range(layout.ranks, layout.ranks + sum(fleet.engines))
    assert network.aborted == set(engines)  # each has left the group and its communicator
    assert network.largest_batch <= dtypes * -(-layout.ranks // sum(fleet.engines))


@pytest.mark.parametrize(
    ("network", "trainers", "engines", "mapped"),
    [
        (GlooNetwork, (0, 0, 1, 1), (0, 0, 1, 1), {0, 1, 2, 3}),  # each host holds the whole model
        (GlooNetwork, (0, 0, 0, 0), (0, -1, -1, -1), {0}),
        (GlooNetwork, (0, 0, 1, 1), (-1, -1, 1, 1), {2, 3}),
        (LateNetwork, (0, 0, 1, 1), (-1, -1, 1, 1), {2, 3}),
    ],
)
def test_a_plan_mixes_mapped_memory_and_messages(
    network: Any, trainers: tuple[int, ...], engines: tuple[int, ...], mapped: set[int]
) -> None:
    """Two hosts by their numbers: bit-equal, each byte once, no message where memory is mapped."""
    settings, layout = model("qwen3_moe"), LayoutSettings(ranks=4, expert=2)
    fleet = EngineSizes((1, 1, 2), hosts=Hosts(trainers, engines))
    loaded, inboxes = refit(settings, layout, fleet, network())
    check(settings, fleet, loaded)
    plan = Plan(settings, layout, fleet)
    for rank, inbox in enumerate(inboxes):
        size = 4 * sum(contents.numel() for contents in loaded[rank].values())
        assert inbox.received_bytes == size
        senders = {each.trainer_rank for bucket in inbox.buckets for each in bucket.messages}
        near = {sender for sender in senders if plan.fleet.mapped(sender, rank)}
        assert near == (senders if rank in mapped else set())
    sent = [
        message
        for rank in range(4)
        for message in Outbox(plan, rank, {}, [], CPU)._sent
        if message.engine_rank in mapped
    ]
    assert not sent


def test_a_trainer_packs_no_more_than_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `wait` that does not hold the host would let all messages be packed at once."""
    live: list[weakref.ref[torch.Tensor]] = []
    most, packed = 0, executor._packed

    def counted(parts: Any) -> list[torch.Tensor]:
        nonlocal most
        gc.collect()
        found = packed(parts)
        live.extend(map(weakref.ref, found))
        most = max(most, sum(each() is not None for each in live))
        return found

    monkeypatch.setattr(executor, "_packed", counted)
    settings = model("mixtral", layers=12)
    refit(settings, LayoutSettings(), EngineSizes((1,), forwarding=False), LateNetwork())
    assert len(live) > 2 * IN_FLIGHT
    assert most <= IN_FLIGHT


def stuck(network: LateNetwork, seconds: float) -> tuple[str, float]:
    """Send to an engine that is dead; return the error and the seconds until it came."""
    settings, layout = model("mixtral"), LayoutSettings()
    plan = Plan(settings, layout, EngineSizes((1,)))
    with network.patched():
        outbox = Outbox(plan, 0, held(settings, layout)[0], [network.meeting(2, seconds)], CPU)
        start = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            outbox.send()
    return str(error.value), time.monotonic() - start


def test_a_sender_stops_waiting_for_a_dead_engine_when_it_is_reported() -> None:
    network = LateNetwork(dead=frozenset({1}))
    threading.Timer(0.2, network.store.set, (LOST, "")).start()
    reason, seconds = stuck(network, 60.0)
    assert "another rank of the refit is gone" in reason
    assert seconds < 30
    assert network.aborted == {0}


def test_a_sender_stops_waiting_for_a_silent_engine_and_reports_it() -> None:
    network = LateNetwork(dead=frozenset({1}))
    reason, _ = stuck(network, 0.3)
    assert "no rank at the other end within 0.3 s" in reason
    assert network.store.check([LOST])
    assert network.aborted == {0}


def test_an_error_of_nccl_ends_the_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A work that failed is completed too, and its buffers hold anything."""
    monkeypatch.setattr(LateWork, "is_completed", lambda _: True)
    monkeypatch.setattr(LateWork, "exception", lambda _: RuntimeError("ncclSystemError: no route"))
    network = LateNetwork(dead=frozenset({1}))
    reason, _ = stuck(network, 60.0)
    assert reason == "refit: ncclSystemError: no route"
    assert network.store.check([LOST])  # so that the other ranks stop waiting
    assert network.aborted == {0}
