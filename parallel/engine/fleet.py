"""The fleet of a run's engines, from the trainer's side: which live, and with which weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.distributed import any_rank, broadcast, gather, host_store, is_main, on_main
from parallel.engine.client import EngineClient, EngineError, EngineRefused
from parallel.engine.topology import Topology, TrainerPlace
from parallel.engine.wire import EngineDescription, Join, Refit, Refitted, Wake, model_digest
from parallel.errors import report_notice
from parallel.machine.device import device, gpu_ordinals, synchronize
from parallel.machine.network import LOOPBACK, address_of
from parallel.model.policy import Policy
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings
from parallel.timeline import phase
from parallel.weights.executor import Outbox, add_fingerprints
from parallel.weights.mapping import (
    SharedMemory,
    addresses,
    host_identity,
    share,
    shared_memory_room,
)
from parallel.weights.names import EMBEDDING, HEAD
from parallel.weights.planner import EngineSizes, Hosts, Plan
from parallel.weights.transport import Meeting

ATTEMPTS = 3  # of a refit that fails although no engine was lost
JOIN_SECONDS = 120.0  # in which ranks meet, or receive a message


class RefitError(EngineError):
    """A refit after which the engines do not have the trainer's weights."""


class AllLost(EngineError):
    """No engine is live, and one that starts needs the device that the trainer's weights are on."""


class Fleet:
    """The trainer's link to its engines, on every rank; the main rank calls them.

    An engine that dies is `lost`, and joins again at the first refit after its restart. A client is
    of one process; with `engine.data` the members of an engine have one each, and are lost and join
    together.

    Example: two engines that share the trainer's GPUs, at one training step.

        await_engines(make_room)  both are connected (elsewhere `refit` connects)
        refit(policy, version=7)  weights wake, all ranks join, 7 is sent; {"refit_bytes": ...}
        open_caches()             caches wake; the scheduler samples from live()
        sleep()                   both free the GPUs, and the trainer computes
    """

    def __init__(
        self,
        addresses: list[Path],
        model: ModelSettings,
        layout: LayoutSettings,
        settings: EngineSettings,
        interface: str = LOOPBACK,
        notify: Callable[[str], None] = report_notice,
    ) -> None:
        self.model, self.layout, self.settings = model, layout, settings
        self.interface = interface
        self.notify = notify
        self.sleeps = settings.sleeps_on(device().type)
        self.seconds = 0.0  # of sleeping and waking, since they were last read
        self.start_seconds = 0.0  # of waiting for engines that start, since they were last read
        self.descriptions: dict[EngineClient, EngineDescription] = {}  # of live engines
        self.losses = 0
        self.reports: list[Refitted] = []  # of the last refit, by engine; main rank only
        self._clients: list[EngineClient] = []
        self._joined: dict[EngineClient, str] = {}  # members of the plan, with their `instance`
        self._store: dist.TCPStore | None = None
        self._policy: Policy | None = None
        self._ranks: list[TrainerPlace] = []  # by rank
        self._outbox: Outbox | None = None
        self._plan: Plan | None = None
        self._meetings: list[Meeting] = []
        self._shared_at: list[int] | None = None  # addresses of the memory that engines map
        if is_main():
            self._clients = [EngineClient(address, settings) for address in addresses]

    def live(self) -> list[EngineClient]:
        """Return the engines that have the weights and are not lost. Main rank only."""
        return [client for client in self._joined if client in self.descriptions]

    def lost(self, client: EngineClient, reason: str) -> None:
        """Have the launcher restart this engine, with all its members. Main rank only."""
        if self.descriptions.pop(client, None) is not None:
            self.losses += 1
            for other in self._members_of(client):
                self.descriptions.pop(other, None)
            client.give_up(reason)

    def _members_of(self, client: EngineClient) -> list[EngineClient]:
        """Return the clients of all members of a client's engine."""
        first_member = self._clients.index(client) // self.settings.data * self.settings.data
        return self._clients[first_member : first_member + self.settings.data]

    def await_engines(self, make_room: Callable[[], None]) -> None:
        """Connect to the engines that a refit is to have, where they sleep. Collective.

        An engine that starts needs the device: where there is one to wait for, `make_room` is
        called first, on every rank. Elsewhere a refit itself connects.

        Waits for: every engine that was never live, and a restarted one while no other is live.
        Unblocked by: its process, which publishes its address.
        """
        if not self.sleeps:
            return
        if on_main(lambda: next(self._awaited(), None) is not None):
            make_room()
            on_main(self._connect)

    def refit(self, policy: Policy, version: int) -> dict[str, float]:
        """Send the policy's weights to every live engine; return metrics. Collective.

        When an engine is lost during a refit, the refit is repeated with the others, until all live
        engines have the same weights. An engine that sleeps wakes without its cache: `open_caches`
        follows once the trainer has left the device.

        Waits for: all ranks, and all live engines, each at the end of its current step.
        Unblocked by: the same call on every rank; `EngineClient.join` and `refit`, called by the
            main rank in threads while all ranks take part.

        Raises:
            AllLost: no engine that sleeps is live; call `await_engines` and refit again.
            RefitError: an engine has other weights than the trainer, or all attempts failed.
            EngineError: no engine started in time, or one is for another model.
        """
        parameters = policy.named_weights()
        if policy is not self._policy:
            # The memory that engines map is the former model's.
            self._policy = policy
            self._leave()
            self._ranks = gather(_place(parameters))
        synchronize(device())  # the last step's writes are done before an engine may read
        failures, losses, answers = 0, self.losses, None
        while answers is None:
            sizes = on_main(self._gather)
            if not self._turn(lambda client: client.wake(Wake("weights"))):
                self._leave()
            elif sizes is None or self._join(parameters, sizes):
                answers = self._send(parameters, version)
            if answers is None:
                failures += 1
                # Losing an engine is no failure of the refit: each loss allows one attempt more.
                if failures == ATTEMPTS + broadcast(self.losses - losses):
                    raise RefitError("the engines live but refits fail; see their logs")
        self.reports = answers
        if self.settings.check_refit:
            assert self._outbox is not None
            fingerprints = gather(self._outbox.fingerprints())
            on_main(lambda: self._check_fingerprints(fingerprints))
        ranks = [rank for answer in answers for rank in answer.ranks]
        return on_main(
            lambda: {
                "refit_bytes": float(max(rank.received_bytes for rank in ranks)),
                "refit_staging_bytes": float(max(rank.staging_bytes for rank in ranks)),
            }
        )

    def open_caches(self) -> None:
        """Have engines that sleep allocate their caches, to sample. Collective."""
        self._turn(lambda client: client.wake(Wake("kv_cache")))

    def sleep(self) -> None:
        """Have engines that sleep free the device's memory for the trainer. Collective.

        One that does not is restarted.

        Waits for: each live engine, at most engine.hang_timeout_seconds.
        Unblocked by: its answer, once its requests are dropped and the memory is free.
        """
        self._turn(lambda client: client.sleep())

    def _turn(self, ask: Callable[[EngineClient], Any]) -> bool:
        """Call every live engine that sleeps; return False where one was lost. Collective."""
        if not self.sleeps:
            return True
        start = time.perf_counter()

        def call() -> bool:
            with ThreadPoolExecutor(max(1, len(self.descriptions))) as pool:
                futures = {client: pool.submit(ask, client) for client in self.descriptions}
            failed = {client: future.exception() for client, future in futures.items()}
            for client, error in failed.items():
                if isinstance(error, EngineError):
                    self.lost(client, str(error))
                elif error is not None:
                    raise error
            return not any(failed.values())

        answered = on_main(call)
        self.seconds += time.perf_counter() - start
        return answered

    def _awaited(self) -> Iterator[EngineClient]:
        """Yield the engines to connect to, in view of those connected since. Main rank only.

        A restart is not waited for while another engine is live.
        """
        for client in self._clients:
            if client in self.descriptions:
                continue
            if not (self._joined and self._others_live(client)) or self._restarted(client):
                yield client

    def _connect(self) -> None:
        """Connect to engines that have (re)started, and wait for one where none is live."""
        for client in self._awaited():
            start = time.perf_counter()
            with phase("wait", waits_for=client.name):
                described = client.connect()
            self.start_seconds += time.perf_counter() - start
            if described.model != model_digest(self.model):
                raise EngineError(
                    f"{client.name} was started for another model than this stage's; stop the"
                    " launcher that owns it, then resume"
                )
            for key in ("expert_parallel", "data"):
                if (actual := getattr(described, key)) != getattr(self.settings, key):
                    raise EngineError(
                        f"{client.name} was started with engine.{key} = {actual}, unlike this"
                        " stage; stop the launcher that owns it, then resume"
                    )
            self.descriptions[client] = described

    def _gather(self) -> EngineSizes | None:
        """Return the engines of the next refit, or None where they are unchanged. Main rank only.

        Engines that sleep are connected before (`await_engines`), others here.
        """
        if not self.sleeps:
            self._connect()
        elif not self.descriptions:
            raise AllLost("no engine is live, and none can start beside the trainer's weights")
        members = [client for client in self._clients if client in self.descriptions]
        joining = {client: self.descriptions[client].instance for client in members}
        if joining == self._joined and self._outbox is not None:
            return None
        self._joined = joining
        data, whole = self.settings.data, self.settings.expert_parallel
        sizes = tuple(data * self.descriptions[client].tensor for client in members[::data])
        topology = self._topology()
        hosts = topology.hosts(self.settings.transport)
        return EngineSizes(sizes, topology.forwards(hosts), whole, data, hosts)

    def _others_live(self, client: EngineClient) -> bool:
        """Return whether an engine other than the client's is live."""
        return bool(self.descriptions.keys() - set(self._members_of(client)))

    def _restarted(self, client: EngineClient) -> bool:
        """Return whether all members of a client's engine are new, or already connected."""
        members = self._members_of(client)
        return all(member in self.descriptions or member.newcomer() for member in members)

    def _topology(self) -> Topology:
        """Return the places of all ranks. Main rank only."""
        described = {client: self.descriptions[client].places for client in self._joined}
        names = [
            f"{client.name}, rank {rank}"
            for client, places in described.items()
            for rank in range(len(places))
        ]
        places = [place for engine_places in described.values() for place in engine_places]
        return Topology(self._ranks, places, names)

    def _meet(self, hosts: Hosts | None) -> list[Meeting]:
        """Host the meetings of the ranks that send messages. Main rank only."""
        topology = self._topology()
        host = address_of(LOOPBACK if topology.local else self.interface)
        if self._store is None or self._store.host != host:
            self._store = host_store(host, 0, timedelta(seconds=JOIN_SECONDS))
        port = self._store.port
        return [
            Meeting(host, port, secrets.token_hex(16), members, JOIN_SECONDS)
            for members in topology.groups(hosts)
        ]

    def _join(self, parameters: dict[str, torch.Tensor], sizes: EngineSizes) -> bool:
        """Have every rank and every engine make its part of the plan, and meet; return success.

        Waits for: all ranks of the trainer and of the engines, at most JOIN_SECONDS.
        Unblocked by: the last of them to connect to the meetings' store. Collective.
        """
        self._leave()
        self._plan = plan = Plan(self.model, self.layout, sizes)
        rank, hosts = dist.get_rank(), sizes.hosts
        sends = hosts is None or any(
            not hosts.map(rank, message.engine_rank) for message in plan.send(rank)
        )
        meet = any_rank(sends or plan.forwards)[0]
        self._meetings = meetings = on_main(lambda: self._meet(hosts)) if meet else []
        layout, data = self.layout.model_dump(), sizes.data
        tensor = [self.descriptions[client].tensor for client in self._joined]
        first_ranks = dict(zip(self._joined, accumulate(tensor, initial=0), strict=False))
        numbers = hosts and (list(hosts.trainers), list(hosts.engines))

        def ask(client: EngineClient) -> None:
            fleet, whole, place = list(sizes.engines), sizes.expert_parallel, first_ranks[client]
            planned = layout, fleet, whole, sizes.forwarding, data, place, numbers
            client.join(Join(*planned, meetings, JOIN_SECONDS))

        def open_outbox() -> None:
            self._outbox = Outbox(plan, rank, parameters, meetings, device())

        return self._exchange(ask, open_outbox) is not None

    def _send(self, parameters: dict[str, torch.Tensor], version: int) -> list[Any] | None:
        """Have the engines take the parameters; return what `_exchange` does. Collective."""
        assert self._outbox is not None
        self._outbox.parameters = parameters
        handles = self._share(parameters)
        # Engines that map a GPU's memory would keep the trainer from freeing it for their turn.
        request = Refit(version, self.settings.check_refit, handles, release=self.sleeps)
        return self._exchange(lambda client: client.refit(request), self._outbox.send)

    def _share(self, parameters: dict[str, torch.Tensor]) -> dict[int, SharedMemory]:
        """Return what engines have to map, by trainer rank; {} where they have it. Collective.

        No rank returns before the weights are written on every rank.
        """
        assert self._plan is not None
        if (hosts := self._plan.fleet.hosts) is None:
            return {}
        if not any_rank(self.sleeps or addresses(parameters) != self._shared_at)[0]:
            return {}
        rank = dist.get_rank()
        mapped = any(hosts.map(rank, message.engine_rank) for message in self._plan.send(rank))
        memories = gather(share(parameters) if mapped else None)
        self._shared_at = addresses(parameters)
        return {rank: shared for rank, shared in enumerate(memories) if shared is not None}

    def _leave(self) -> None:
        """Leave the engines' groups; they map nothing any more."""
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = self._shared_at = None

    def _report_loss(self, future: Future[Any]) -> None:
        """End the waiting of ranks that would not notice that an engine failed."""
        if future.exception() is not None:
            for meeting in self._meetings:
                with suppress(RuntimeError):
                    meeting.report_loss()

    def _exchange(
        self, ask: Callable[[EngineClient], Any], take_part: Callable[[], None]
    ) -> list[Any] | None:
        """Call every member while all ranks take part. Collective.

        Returns the members' answers on the main rank, an empty list on the others; or None on all
        ranks where anything failed. Members that did not answer are lost.
        """
        failed = False
        with ThreadPoolExecutor(max(1, len(self._joined))) as pool:
            # First, in threads: an engine answers only once the ranks have taken part, which wait
            # for it. `_joined` is empty but on the main rank.
            futures = {client: pool.submit(ask, client) for client in self._joined}
            for future in futures.values():
                future.add_done_callback(self._report_loss)
            try:
                take_part()
            except RuntimeError as error:  # from the process group: a member is gone
                failed = True
                self._leave()  # so that all other members fail too
                print(f"rank {dist.get_rank()}: {error}", flush=True)
            for client, future in futures.items():
                reason = future.exception()
                if reason is None:
                    continue
                if not isinstance(reason, EngineError):
                    raise reason
                failed = True
                if isinstance(reason, EngineRefused):
                    self.notify(f"{reason}; retrying the refit")
                else:
                    self.lost(client, str(reason))
        if any_rank(failed)[0]:
            self._leave()
            return None
        return [future.result() for future in futures.values()]

    def _check_fingerprints(self, fingerprints: list[dict[str, int]]) -> None:
        """Compare every engine rank's fingerprints with the trainer's `given` ones, by rank."""
        assert self._plan is not None
        expected: dict[str, int] = {}
        for rank_fingerprints in fingerprints:
            for key, value in rank_fingerprints.items():
                expected[key] = add_fingerprints(expected.get(key, 0), value)
        names = {EMBEDDING: "the embedding", HEAD: "the head"}
        place = 0
        for client, answer in zip(self._joined, self.reports, strict=True):
            for rank, report in enumerate(answer.ranks):
                source = self._plan.source(place)
                place += 1
                wrong = [
                    names.get(key, f"layer {key}")
                    for key in sorted(self._plan.description.buckets)
                    if report.fingerprints.get(f"{key}", "0")
                    != str(expected.get(f"{source}/{key}", 0))
                ]
                if wrong:
                    raise RefitError(
                        f"after a refit rank {rank} of {client.name} has other weights than the"
                        f" trainer in {', '.join(wrong)}"
                    )


def put_to_sleep(addresses: list[Path], settings: EngineSettings, needed: bool) -> None:
    """Put engines to sleep, so that a stage can build its models on their devices.

    They may be awake since a killed stage. Where the stage wants them, wait until all have started,
    at the same time; else ask those that have. Raises EngineError where one that is wanted does not
    sleep.
    """
    clients = [EngineClient(address, settings) for address in addresses]
    engines = [clients[at : at + settings.data] for at in range(0, len(clients), settings.data)]
    with ThreadPoolExecutor(max(1, len(engines))) as pool:
        for future in [pool.submit(_put_to_sleep, members, needed) for members in engines]:
            future.result()


def _put_to_sleep(members: list[EngineClient], needed: bool) -> None:
    """Put all members of one engine to sleep."""
    if needed:
        _connect_all(members)
        if failed := _asked_to_sleep(members):
            client, error = failed
            client.give_up(str(error))
            _connect_all(members)  # an engine sleeps when it starts
    elif all(newcomers := [client.newcomer() for client in members]):
        for client, address in zip(members, newcomers, strict=True):
            client.address = address
        if failed := _asked_to_sleep(members):
            # Where it holds the memory, the trainer will say so.
            what = "an engine that this stage does not need may hold memory"
            report_notice(f"{what}: {failed[1]}")


def _connect_all(members: list[EngineClient]) -> None:
    with ThreadPoolExecutor(len(members)) as pool:
        for future in [pool.submit(client.connect) for client in members]:
            future.result()


def _asked_to_sleep(members: list[EngineClient]) -> tuple[EngineClient, EngineError] | None:
    """Put all members of an engine to sleep, at once; return the first that does not, and why."""
    with ThreadPoolExecutor(len(members)) as pool:
        futures = {client: pool.submit(client.sleep) for client in members}
    failed = {client: error for client, future in futures.items() if (error := future.exception())}
    for client, error in failed.items():
        if not isinstance(error, EngineError):
            raise error
        return client, error
    return None


def _place(parameters: dict[str, torch.Tensor]) -> TrainerPlace:
    """Return this rank's place."""
    weights, index = sum(tensor.nbytes for tensor in parameters.values()), device().index
    [gpu] = [uuid for uuid, ordinal in gpu_ordinals().items() if ordinal == index] or [""]
    return TrainerPlace(host_identity(), gpu, weights, shared_memory_room())
