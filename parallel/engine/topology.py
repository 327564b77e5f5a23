"""The ways of a refit: who maps whose memory, and which ranks send each other messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parallel.engine.client import EngineError
from parallel.engine.wire import EnginePlace
from parallel.weights.planner import Hosts


class TrainerPlace(NamedTuple):
    """A trainer rank's host and GPU (a UUID, "" on a CPU), and bytes.

    `weights` are the rank's own, `room` is left in the shared memory of a host without GPUs.
    """

    host: str
    gpu: str
    weights: int
    room: int


class Topology:
    """The places of a trainer's ranks and of the ranks of its engines, numbered together.

    `engines` are the engine ranks' places, `names` their names in messages.
    """

    def __init__(
        self, trainers: Sequence[TrainerPlace], engines: Sequence[EnginePlace], names: list[str]
    ) -> None:
        self.trainers, self.engines, self.names = trainers, engines, names

    @property
    def local(self) -> bool:
        """True if one host runs all ranks."""
        hosts = {place.host for place in self.trainers} | {place.host for place in self.engines}
        return len(hosts) == 1

    def hosts(self, transport: str) -> Hosts | None:
        """Return who maps whose memory under `engine.transport`; None where nobody does.

        "auto" maps between ranks of one host where nothing is in the way.

        Raises:
            EngineError: "shared_memory" is set and some rank cannot map.
        """
        if transport == "messages":
            return None
        obstacles = list(map(self._obstacle, self.engines))
        if transport == "shared_memory":
            wrong = "" if self.local else "engines and ranks are on several hosts"
            for name, obstacle in zip(self.names, obstacles, strict=True):
                wrong = wrong or (obstacle and f"{name}: {obstacle}")
            if wrong:
                raise EngineError(
                    f"engine.transport is shared_memory, but {wrong}; set it to messages or auto"
                )
        if all(obstacles):
            return None
        numbers: dict[str, int] = {}
        trainers = tuple(
            numbers.setdefault(trainer.host, len(numbers)) for trainer in self.trainers
        )
        engines = zip(self.engines, obstacles, strict=True)
        return Hosts(trainers, tuple(-1 if why else numbers[at.host] for at, why in engines))

    def groups(self, hosts: Hosts | None) -> list[list[int]]:
        """Return the members of each process group for messages; engine ranks follow the trainers.

        One group has all ranks, unless engines share GPUs with the trainer: NCCL refuses two ranks
        of a group on one GPU. Then each engine host has a group with the trainer ranks elsewhere.

        Raises:
            EngineError: an engine on a shared GPU does not map the memory of its host's trainers.
        """
        count = len(self.trainers)
        places = list(enumerate(self.engines, start=count))
        used = {trainer.gpu for trainer in self.trainers if trainer.gpu}
        if not any(place.gpus[:1] and place.gpus[0] in used for _, place in places):
            return [list(range(count + len(places)))]
        for (rank, place), name in zip(places, self.names, strict=True):
            near = any(trainer.host == place.host for trainer in self.trainers)
            if near and (hosts is None or hosts.engines[rank - count] < 0):
                why = self._obstacle(place) or "engine.transport is messages; set it to auto"
                raise EngineError(
                    f"{name} shares GPUs with the trainer, between which NCCL sends nothing, and"
                    f" cannot map their memory: {why}"
                )
        return [
            [
                *(rank for rank, trainer in enumerate(self.trainers) if trainer.host != host),
                *(rank for rank, place in places if place.host == host),
            ]
            for host in dict.fromkeys(place.host for place in self.engines)
        ]

    def forwards(self, hosts: Hosts | None) -> bool:
        """Return whether engines may feed one another: all ranks must then be in one group."""
        return len(self.groups(hosts)) == 1

    def _obstacle(self, place: EnginePlace) -> str:
        """Return why an engine rank cannot map its host's trainer ranks, "" where it can."""
        near = [trainer for trainer in self.trainers if trainer.host == place.host]
        if not near:
            return "no rank of the trainer is on its host"
        if hidden := {trainer.gpu for trainer in near if trainer.gpu}.difference(place.gpus):
            return (
                f"the trainer's GPUs {', '.join(sorted(hidden))} are not visible to it; add them to"
                " the end of its CUDA_VISIBLE_DEVICES"
            )
        needed = sum(trainer.weights for trainer in near)
        room = min(trainer.room for trainer in near)
        if not near[0].gpu and needed > room:
            return f"the weights need {needed >> 20} MiB of /dev/shm, {room >> 20} MiB available"
        return ""
