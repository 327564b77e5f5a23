"""A refit by resharding beside the way of gathering: full tensors, to every rank of an engine.

    python benchmarks/refit.py

Real trainer ranks of 2, 4 and 8 processes (megatron-core over gloo) and the two ranks of an engine,
which put what they get where their loaders would want it; vLLM's own loading, alike for both ways,
is left out. Each way has the same processes and weights, and they take turns. `seconds` is the time
from the word until the last process has done; the memory is each process's own high-water mark
(VmHWM) over what was resident before, so that a transport's buffers count too. Prints JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from hugging_face import resident
from machine import measured

from parallel.settings import LayoutSettings, ModelSettings

MODEL = ModelSettings(
    vocabulary_size=16384,
    hidden_size=512,
    layers=4,
    attention_heads=8,
    key_value_heads=4,
    head_dim=64,
    experts=16,
    experts_per_token=2,
    expert_hidden_size=512,
)
LAYOUTS = {
    "2": LayoutSettings(ranks=2, expert=2),
    "4": LayoutSettings(ranks=4, tensor=2, expert=2, pipeline=2),
    "8": LayoutSettings(ranks=8, tensor=2, expert=2, pipeline=2),
}
ENGINE_RANKS = 2
ROUNDS = 5
SHARED = "shared_memory"
WAYS = (SHARED, "messages", "gather")
TIMEOUT = 120.0
MEBIBYTE = 1 << 20
KEPT = ExitStack()  # what a process must not let go of as long as it lives


def measure() -> dict[str, Any]:
    """Every layout, one after another."""
    return {
        **measured(),
        "model_mebibytes": round(model_bytes() / MEBIBYTE, 1),
        "engine_ranks": ENGINE_RANKS,
        "rounds": ROUNDS,
        "trainer_ranks": {name: compare(layout) for name, layout in LAYOUTS.items()},
    }


def compare(layout: LayoutSettings) -> dict[str, Any]:
    """The ways in turn, on one set of processes; medians over the rounds after the first."""
    context = multiprocessing.get_context("spawn")
    ranks = layout.ranks + ENGINE_RANKS
    address = f"127.0.0.1:{free_port()}:{free_port()}:{secrets.token_hex(8)}"
    pipes: list[Connection] = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        work = (theirs, rank, layout, address)
        context.Process(target=serve, args=work, daemon=True).start()
        pipes.append(ours)
    try:
        answers(pipes)
        rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS + 1):
            for way in WAYS:
                begun = time.perf_counter()
                for pipe in pipes:
                    pipe.send(way)
                measured_times = answers(pipes)
                seconds = time.perf_counter() - begun
                rounds[way].append(summary(measured_times, layout.ranks, seconds))
    finally:
        for pipe in pipes:
            pipe.close()
    found = {way: medians(rounds[way][1:]) for way in WAYS}
    bound = max(engine_bytes(rank) for rank in range(ENGINE_RANKS)) / MEBIBYTE
    return {
        "bound_mebibytes": round(bound, 2),
        **found,
        "times_faster": {
            way: round(found["gather"]["seconds"] / found[way]["seconds"], 2) for way in WAYS[:2]
        },
    }


def summary(times: list[dict[str, float]], trainers: int, seconds: float) -> dict[str, float]:
    """The largest of all ranks of a kind, in MiB."""
    groups = {"trainer": times[:trainers], "engine": times[trainers:]}
    largest = {
        f"{kind}_{what}": max(each[what] for each in group) / MEBIBYTE
        for kind, group in groups.items()
        for what in ("sent", "received", "peak")
    }
    return {"seconds": seconds, **largest}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of every number by itself."""
    return {name: round(median(each[name] for each in rounds), 3) for name in rounds[0]}


def serve(pipe: Connection, rank: int, layout: LayoutSettings, address: str) -> None:
    """One process: do what the pipe says until it is closed."""
    host, port, master, prefix = address.split(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=master, OMP_NUM_THREADS="1")
    from parallel.weights.transport import Meeting

    def meeting(way: str) -> Meeting:
        members = list(range(layout.ranks + ENGINE_RANKS))
        return Meeting(host, int(port), f"{prefix}/{way}", members, TIMEOUT)

    ways = trainer(rank, layout, meeting) if rank < layout.ranks else engine(rank, layout, meeting)
    pipe.send(True)
    while True:
        try:
            way = pipe.recv()
        except EOFError:
            os._exit(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        sent, received = ways[way]()
        peak = resident("VmHWM") - before
        pipe.send({"sent": sent, "received": received, "peak": peak})


Way = Callable[[], tuple[int, int]]


def trainer(rank: int, layout: LayoutSettings, meeting: Callable[[str], Any]) -> dict[str, Way]:
    """A rank of the trainer, with its part of the model."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.ranks))
    from parallel.distributed import gather as gathered
    from parallel.distributed import process_groups

    KEPT.enter_context(process_groups(layout, seed=0))
    import torch

    from parallel.model.policy import Policy
    from parallel.weights.executor import Outbox
    from parallel.weights.mapping import share
    from parallel.weights.planner import Plan

    policy = Policy(MODEL, layout)
    policy.start_fresh(0)
    device = torch.device("cpu")
    shared = gathered(share(policy.named_weights()))
    if rank == 0:
        KEPT.callback(id, host_store(meeting(SHARED)))
        meeting(SHARED).store().set(SHARED, msgspec.msgpack.encode(shared).hex())
    boxes = {
        way: Outbox(
            Plan(MODEL, layout, sizes(way, layout)),
            rank,
            policy.named_weights(),
            [] if way == SHARED else [meeting(way)],
            device,
        )
        for way in WAYS[:2]
    }
    messages = whole_messages(meeting, rank)

    def reshard(way: str) -> tuple[int, int]:
        boxes[way].send()
        if way == SHARED:
            return 0, 0
        slices = (s for message in boxes[way].outgoing for s in message.slices)
        return sum(4 * prod(s.box[1]) for s in slices), 0

    def gather() -> tuple[int, int]:
        sent = received = 0
        for _, tensor in policy.weights():
            received += tensor.nbytes
            if rank == 0:
                peers = range(layout.ranks, layout.ranks + ENGINE_RANKS)
                messages.start(sends=[(tensor, peer) for peer in peers]).wait()
                sent += tensor.nbytes * ENGINE_RANKS
        return sent, received

    ways: dict[str, Way] = {way: partial(reshard, way) for way in WAYS[:2]}
    return {**ways, "gather": gather}


def engine(rank: int, layout: LayoutSettings, meeting: Callable[[str], Any]) -> dict[str, Way]:
    """A rank of the engine, with room for what it needs."""
    import torch

    from parallel.weights.executor import Inbox
    from parallel.weights.mapping import SharedMemory
    from parallel.weights.names import tensors
    from parallel.weights.needs import needed
    from parallel.weights.planner import Plan

    torch.set_num_threads(1)
    place, device = rank - layout.ranks, torch.device("cpu")
    room = {name: torch.zeros(box[1]) for name, box in needed(MODEL, ENGINE_RANKS, place)}
    encoded = bytes.fromhex(meeting(SHARED).store().get(SHARED).decode())
    shared = msgspec.msgpack.decode(encoded, type=list[SharedMemory])
    boxes = {
        way: Inbox(
            MODEL,
            layout,
            Plan(MODEL, layout, sizes(way, layout)),
            place,
            [] if way == SHARED else [meeting(way)],
            device,
        )
        for way in WAYS[:2]
    }
    boxes[SHARED].map(dict(enumerate(shared)))
    messages = whole_messages(meeting, rank)

    def reshard(way: str) -> tuple[int, int]:
        boxes[way].start()
        for bucket in boxes[way].buckets:
            for (name, _), contents in boxes[way].take(bucket).items():
                room[name].copy_(contents)
        return 0, boxes[way].received_bytes

    def gather() -> tuple[int, int]:
        received = 0
        needs = dict(needed(MODEL, ENGINE_RANKS, place))
        for name, shape in tensors(MODEL).items():
            whole = torch.empty(shape)
            messages.start(receives=[(whole, 0)]).wait()
            received += whole.nbytes
            offsets, sizes = needs[name]
            place_in = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            room[name].copy_(whole[place_in])
        return 0, received

    ways: dict[str, Way] = {way: partial(reshard, way) for way in WAYS[:2]}
    return {**ways, "gather": gather}


def sizes(way: str, layout: LayoutSettings) -> Any:
    """The engine's, with everything on one host where memory is shared."""
    from parallel.weights.planner import EngineSizes, Hosts

    hosts = Hosts((0,) * layout.ranks, (0,) * ENGINE_RANKS) if way == SHARED else None
    return EngineSizes((ENGINE_RANKS,), hosts=hosts)


def whole_messages(meeting: Callable[[str], Any], rank: int) -> Any:
    """A group like a refit's, for whole tensors."""
    import torch

    from parallel.weights.transport import Messages

    return Messages(meeting("gather"), rank, torch.device("cpu"))


def host_store(meeting: Any) -> Any:
    """The store where all meet, on the port that was chosen for it."""
    from parallel import distributed

    return distributed.host_store(meeting.host, meeting.port, timedelta(seconds=TIMEOUT))


def answers(pipes: list[Connection]) -> list[Any]:
    """What every process says next."""
    found = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(2 * TIMEOUT):
            raise RuntimeError(f"process {rank} says nothing")
        found.append(pipe.recv())
    return found


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model."""
    from parallel.weights.names import tensors

    yield from tensors(MODEL).items()


def model_bytes() -> int:
    """Of the whole model."""
    return sum(4 * prod(shape) for _, shape in shapes())


def engine_bytes(rank: int) -> int:
    """Of what a rank of the engine needs: the least that it can receive."""
    from parallel.weights.needs import needed

    return sum(4 * prod(box[1]) for _, box in needed(MODEL, ENGINE_RANKS, rank))


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
