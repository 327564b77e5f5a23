"""The fleet of a run's engines, from the trainer's side: which live, and with which weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel.device import device
from parallel.distributed import any_rank, broadcast, gather, host_store, is_main, on_main
from parallel.engine.client import EngineClient, EngineError, EngineRefused
from parallel.engine.wire import EngineDescription, Join, Refit, Refitted, Wake, model_digest
from parallel.errors import report_notice
from parallel.model.policy import Policy
from parallel.network import LOOPBACK, address_of
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings
from parallel.weights.executor import Outbox, add_fingerprints
from parallel.weights.names import EMBEDDING, HEAD
from parallel.weights.planner import EngineSizes, Plan
from parallel.weights.transport import Meeting, host_identity, share, shared_memory_room

ATTEMPTS = 3  # of a refit that fails although no engine was lost
JOIN_SECONDS = 120.0  # in which ranks meet, or receive a message


class RefitError(EngineError):
    """A refit after which the engines do not have the trainer's weights."""


class Fleet:
    """The trainer's link to its engines, on every rank; the main rank calls them.

    An engine that dies is `lost`, and joins again at the first refit after its restart.
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
        self.descriptions: dict[EngineClient, EngineDescription] = {}  # of live engines
        self.losses = 0
        self.reports: list[Refitted] = []  # of the last refit, by engine; main rank only
        self._clients: list[EngineClient] = []
        self._joined: dict[EngineClient, str] = {}  # members of the plan, with their `instance`
        self._store: dist.TCPStore | None = None
        self._policy: Policy | None = None
        self._ranks: list[tuple[str, int]] = []  # host and bytes of weights, by rank
        self._transport = ""
        self._outbox: Outbox | None = None
        self._plan: Plan | None = None
        if is_main():
            self._clients = [EngineClient(address, settings) for address in addresses]

    def live(self) -> list[EngineClient]:
        """Return the engines that have the weights and are not lost. Main rank only."""
        return [client for client in self._joined if client in self.descriptions]

    def lost(self, client: EngineClient, reason: str) -> None:
        """Have the launcher restart this engine. Main rank only."""
        if self.descriptions.pop(client, None) is not None:
            self.losses += 1
            client.give_up(reason)

    def refit(self, policy: Policy, version: int) -> dict[str, float]:
        """Send the policy's weights to every live engine; return metrics. Collective.

        When an engine is lost during a refit, the refit is repeated with the others, until all live
        engines have the same weights. An engine that sleeps wakes without its cache: `open_caches`
        follows once the trainer has left the device.

        Raises:
            RefitError: an engine has other weights than the trainer, or all attempts failed.
            EngineError: no engine started in time, or one is for another model.
        """
        if policy is not self._policy:
            self._policy, self._outbox = policy, None
            weights = sum(tensor.nbytes for tensor in policy.named_weights().values())
            self._ranks = gather((host_identity(), weights))
        asked = Refit(version, self.settings.check_refit)

        def send() -> None:
            assert self._outbox is not None
            self._outbox.send()

        failures, losses, answers = 0, self.losses, None
        while answers is None:
            gathering = on_main(self._gather)
            if not self._turn(lambda client: client.wake(Wake("weights"))):
                self._outbox = None
            elif gathering is None or self._join(policy, *gathering):
                answers = self._exchange(lambda client: client.refit(asked), send)
            if answers is None:
                failures += 1
                if failures == ATTEMPTS + broadcast(self.losses - losses):
                    raise RefitError("the engines live but refits fail; see their logs")
        self.reports = answers
        if self.settings.check_refit:
            assert self._outbox is not None
            given = gather(self._outbox.fingerprints())
            on_main(lambda: self._check_fingerprints(given))
        ranks = [rank for answer in answers for rank in answer.ranks]
        return on_main(
            lambda: {
                "refit_bytes": float(max(rank.received_bytes for rank in ranks)),
                "refit_staging_bytes": float(max(rank.staging_bytes for rank in ranks)),
            }
        )

    def open_caches(self) -> None:
        """Have engines that sleep allocate their caches, to sample. Collective."""
        if self.sleeps:
            self._outbox = None  # the trainer's weights will have other addresses
            self._turn(lambda client: client.wake(Wake("kv_cache")))

    def sleep(self) -> None:
        """Have engines that sleep free the device's memory for the trainer. Collective.

        One that does not is restarted.
        """
        self._turn(lambda client: client.sleep())

    def _turn(self, ask: Callable[[EngineClient], Any]) -> bool:
        """Call every live engine that sleeps; return False where one was lost. Collective."""
        if not self.sleeps:
            return True
        start = time.perf_counter()

        def call() -> bool:
            with ThreadPoolExecutor(max(1, len(self.descriptions))) as pool:
                asked = {client: pool.submit(ask, client) for client in self.descriptions}
            failed = {client: each.exception() for client, each in asked.items()}
            for client, error in failed.items():
                if isinstance(error, EngineError):
                    self.lost(client, str(error))
                elif error is not None:
                    raise error
            return not any(failed.values())

        answered = on_main(call)
        self.seconds += time.perf_counter() - start
        return answered

    def _gather(self) -> tuple[Meeting | None, EngineSizes] | None:
        """Connect to engines that have (re)started, and wait for one where none is live.

        Returns the meeting, unless memory is shared, and the engines; or None where the members are
        unchanged. Main rank only.
        """
        for client in self._clients:
            # Do not wait for a restart while another engine is live.
            if client in self.descriptions or (
                self._joined and self.descriptions and not client.newcomer()
            ):
                continue
            described = client.connect()
            if described.model != model_digest(self.model):
                raise EngineError(
                    f"{client.name} was started for another model than this stage's; stop the"
                    " launcher that owns it, then resume"
                )
            if described.expert_parallel != self.settings.expert_parallel:
                raise EngineError(
                    f"{client.name} was started with engine.expert_parallel ="
                    f" {described.expert_parallel}, unlike this stage; stop the launcher that owns"
                    " it, then resume"
                )
            self.descriptions[client] = described
        members = [client for client in self._clients if client in self.descriptions]
        joining = {client: self.descriptions[client].instance for client in members}
        if joining == self._joined and self._outbox is not None:
            return None
        self._joined = joining
        sizes = tuple(self.descriptions[client].tensor for client in members)
        whole = self.settings.expert_parallel
        hosts = {self.descriptions[client].host for client in members}
        local = len(hosts.union(host for host, _ in self._ranks)) == 1
        if self._choose_transport(local) == "shared_memory":
            return None, EngineSizes(sizes, forwarding=False, expert_parallel=whole)
        host = address_of(LOOPBACK if local else self.interface)
        if self._store is None or self._store.host != host:
            self._store = host_store(host, 0, timedelta(seconds=JOIN_SECONDS))
        port, trainers = self._store.port, self.layout.ranks
        prefix, ranks = secrets.token_hex(16), trainers + sum(sizes)
        meeting = Meeting(host, port, prefix, trainers, ranks, JOIN_SECONDS)
        return meeting, EngineSizes(sizes, expert_parallel=whole)

    def _choose_transport(self, local: bool) -> str:
        """Return the transport; "auto" is shared memory where one host runs all and has room."""
        wanted, needed = self.settings.transport, sum(weights for _, weights in self._ranks)
        room = shared_memory_room() + (needed if self._transport == "shared_memory" else 0)
        fits = local and needed <= room
        if wanted == "auto":
            wanted = "shared_memory" if fits else "messages"
        if wanted == "shared_memory" and not fits:
            why = "engines and ranks are on several hosts"
            if local:
                needs = f"{needed >> 20} MiB of /dev/shm"
                why = f"the weights need {needs}, {room >> 20} MiB available"
            wrong = f"engine.transport is shared_memory, but {why}"
            raise EngineError(f"{wrong}; set it to messages or auto")
        self._transport = wanted
        return wanted

    def _join(self, policy: Policy, meeting: Meeting | None, sizes: EngineSizes) -> bool:
        """Have every rank and every engine make its part of the plan, and meet; return success."""
        parameters = policy.named_weights()
        shared = [] if meeting else gather(share(parameters))
        self._plan = plan = Plan(self.model, self.layout, sizes)
        layout, members = self.layout.model_dump(), list(self._joined)

        def ask(client: EngineClient) -> None:
            place = members.index(client)
            fleet, whole = list(sizes.engines), sizes.expert_parallel
            client.join(Join(layout, fleet, whole, place, meeting, shared, JOIN_SECONDS))

        def open_outbox() -> None:
            self._outbox = Outbox(plan, dist.get_rank(), parameters, meeting, device())

        return self._exchange(ask, open_outbox) is not None

    def _exchange(
        self, ask: Callable[[EngineClient], Any], take_part: Callable[[], None]
    ) -> list[Any] | None:
        """Call every member while all ranks take part. Collective.

        Returns the members' answers on the main rank, an empty list on the others; or None on all
        ranks where anything failed. Members that did not answer are lost.
        """
        failed = False
        with ThreadPoolExecutor(max(1, len(self._joined))) as pool:
            asked = {client: pool.submit(ask, client) for client in self._joined}
            try:
                take_part()
            except RuntimeError as error:  # from the process group: a member is gone
                failed = True
                self._outbox = None  # destroys the group, so that all other members fail too
                print(f"rank {dist.get_rank()}: {error}", flush=True)
            for client, future in asked.items():
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
            self._outbox = None
            return None
        return [future.result() for future in asked.values()]

    def _check_fingerprints(self, given: list[dict[str, int]]) -> None:
        """Compare every engine rank's fingerprints with the trainer's `given` ones, by rank."""
        assert self._plan is not None
        expected: dict[str, int] = {}
        for found in given:
            for key, value in found.items():
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


def put_to_sleep(addresses: list[Path], settings: EngineSettings, wanted: bool) -> None:
    """Put engines to sleep, so that a stage can build its models on their devices.

    They may be awake since a killed stage. Where the stage wants them, wait until all have started;
    else ask those that have. Raises EngineError where one that is wanted does not sleep.
    """
    for address in addresses:
        client = EngineClient(address, settings)
        if wanted:
            client.connect()
            try:
                client.sleep()
            except EngineError as error:
                client.give_up(str(error))
                client.connect()  # an engine sleeps when it starts
        elif (found := client.newcomer()) is not None:
            client.address = found
            try:
                client.sleep()
            except EngineError as error:  # where it holds the memory, the trainer will say so
                report_notice(f"an engine that this stage does not need may hold memory: {error}")
