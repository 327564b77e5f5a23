"""All engines of a run as the trainer's ranks see them: which live, and with whose weights."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from parallel.device import device
from parallel.distributed import any_rank, broadcast, gather, host_store, is_main, on_main
from parallel.engine.client import EngineClient, EngineError, EngineRefused
from parallel.engine.wire import EngineDescription, Join, Refit, Refitted, model_digest
from parallel.model.policy import Policy
from parallel.network import LOOPBACK, address_of
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings
from parallel.status_pipe import report_notice
from parallel.weights import checksums
from parallel.weights import planner as plans
from parallel.weights.executor import Outbox, outbox
from parallel.weights.names import EMBEDDING, HEAD
from parallel.weights.transport import Meeting, host_identity, share, shared_memory_room

ATTEMPTS = 3  # at a refit that fails though no engine was lost
JOIN_SECONDS = 120.0  # that ranks wait for one another, or for the bytes of a message


class RefitError(EngineError):
    """The engines did not get the trainer's weights, or got other ones."""


class _Gathering(NamedTuple):
    """What every rank must know to join: where to meet, unless memory is shared, and the engines'
    sizes."""

    meeting: Meeting | None
    sizes: tuple[int, ...]


class Fleet:
    """The trainer's link to its engines, on every rank; the main rank talks to them.

    Engines come and go: one that dies is `lost`, and joins again at the first refit at which its
    new process is there.
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
        self.descriptions: dict[EngineClient, EngineDescription] = {}  # of the engines that live
        self.losses = 0
        self._clients: list[EngineClient] = []
        self._joined: list[tuple[EngineClient, str]] = []  # members of the plan, and which process
        self._store: dist.TCPStore | None = None
        self._policy: Policy | None = None
        self._ranks: list[tuple[str, int]] = []  # of each, its host and its weights' bytes
        self._way_now = ""
        self._outbox: Outbox | None = None
        self._plan: plans.Plan | None = None
        self.reports: list[Refitted] = []  # of the last refit, by engine; main rank only
        if is_main():
            self._clients = [EngineClient(address, settings) for address in addresses]

    def live(self) -> list[EngineClient]:
        """The engines that have the weights and are believed to be well. Main rank only."""
        return [client for client, _ in self._joined if client in self.descriptions]

    def lost(self, client: EngineClient, reason: str) -> None:
        """Ask for another process in this engine's place. Main rank only."""
        if self.descriptions.pop(client, None) is not None:
            self.losses += 1
            client.give_up(reason)

    def refit(self, policy: Policy, version: int) -> dict[str, float]:
        """Bring the policy's weights to every engine that lives or can be had. Collective.

        Where engines are lost meanwhile the others are refitted again, until all that live have the
        same weights. Returns what there is to log.

        Raises:
            RefitError: an engine has other weights than the trainer, or none will take them.
            EngineError: no engine came in time, or one is for another model.
        """
        if policy is not self._policy:
            self._policy, self._outbox = policy, None
            weights = sum(tensor.nbytes for tensor in policy.named_weights().values())
            self._ranks = gather((host_identity(), weights))
        failures, losses = 0, self.losses
        while True:
            gathering = on_main(self._gather)
            answers = self._join(gathering) if gathering else None
            if not gathering or answers is not None:
                answers = self._exchange(
                    lambda client: client.refit(Refit(version, self.settings.check_refit)),
                    self._send,
                )
            if answers is not None:
                break
            failures += 1
            if failures == ATTEMPTS + broadcast(self.losses - losses):
                raise RefitError("the engines live and cannot be refitted; their logs say why")
        self.reports = answers
        if self.settings.check_refit:
            self._compare(answers)
        return broadcast(_measured(answers) if is_main() else None)

    def _gather(self) -> _Gathering | None:
        """Connect to the engines that are there, and wait where there would be none. Main rank
        only; returns None where everything is as it was."""
        for client in self._clients:
            if client in self.descriptions:
                continue
            # An engine that is being replaced is not waited for, while another does its work.
            if self._joined and self.descriptions and not client.replaced():
                continue
            described = client.connect()
            if described.model != model_digest(self.model):
                raise EngineError(
                    f"{client.name} was started for another model than this stage's; end the"
                    " launcher that owns it, and resume"
                )
            self.descriptions[client] = described
        members = [client for client in self._clients if client in self.descriptions]
        joining = [(client, self.descriptions[client].instance) for client in members]
        if joining == self._joined and self._outbox is not None:
            return None
        self._joined = joining
        sizes = tuple(self.descriptions[client].tensor for client in members)
        hosts = {self.descriptions[client].host for client in members}
        local = len(hosts.union(host for host, _ in self._ranks)) == 1
        shared = self._way(local) == "shared_memory"
        return _Gathering(None if shared else self._meet(sizes, local), sizes)

    def _meet(self, sizes: tuple[int, ...], local: bool) -> Meeting:
        """A new place in the store, which is this rank's."""
        host = address_of(LOOPBACK if local else self.interface)
        if self._store is None or self._store.host != host:
            self._store = host_store(host, 0, timedelta(seconds=JOIN_SECONDS))
        ranks = self.layout.ranks
        return Meeting(
            host, self._store.port, secrets.token_hex(16), ranks, ranks + sum(sizes), JOIN_SECONDS
        )

    def _way(self, local: bool) -> str:
        """Shared memory where all are on one host that has room, and nothing else is asked for."""
        wanted, needed = self.settings.transport, sum(weights for _, weights in self._ranks)
        room = shared_memory_room() + (needed if self._way_now == "shared_memory" else 0)
        if wanted == "auto":
            wanted = "shared_memory" if local and needed <= room else "messages"
        if wanted == "shared_memory" and not (local and needed <= room):
            why = (
                f"the host has {room >> 20} MiB of it left and the weights take {needed >> 20}"
                if local
                else "engines and ranks are on several hosts"
            )
            raise EngineError(
                f"engine.transport is shared_memory, but {why}; set it to messages or auto"
            )
        self._way_now = wanted
        return wanted

    def _join(self, gathering: _Gathering) -> list[Any] | None:
        """Every rank and every engine makes its part of the plan, and they meet."""
        assert self._policy is not None
        meeting, sizes = gathering
        parameters = self._policy.named_weights()
        shared = [] if meeting else gather(share(parameters))
        fleet = plans.EngineSizes(sizes, forwarding=meeting is not None)
        self._plan = plan = plans.Plan(self.model, self.layout, fleet)
        layout = self.layout.model_dump()

        def ask(client: EngineClient) -> None:
            place = [member for member, _ in self._joined].index(client)
            client.join(Join(layout, list(sizes), place, meeting, shared, JOIN_SECONDS))

        def open_outbox() -> None:
            self._outbox = outbox(plan, dist.get_rank(), parameters, meeting, device())

        return self._exchange(ask, open_outbox)

    def _send(self) -> None:
        assert self._outbox is not None
        self._outbox.send()

    def _exchange(
        self, ask: Callable[[EngineClient], Any], take_part: Callable[[], None]
    ) -> list[Any] | None:
        """Ask every member for something that all ranks take part in meanwhile. Collective.

        Returns the members' answers on the main rank, and a list on the others; or None on all
        ranks where anything failed. Members that did not answer are lost.
        """
        failed = False
        with ThreadPoolExecutor(max(1, len(self._joined))) as pool:
            asked = {client: pool.submit(ask, client) for client, _ in self._joined}
            try:
                take_part()
            except RuntimeError as error:  # of the process group: a member is gone
                failed = True
                self._outbox = None  # which lets go of the group, so that all others hear of it
                print(f"rank {dist.get_rank()}: {error}", flush=True)
            for client, future in asked.items():
                reason = future.exception()
                if reason is None:
                    continue
                if not isinstance(reason, EngineError):
                    raise reason
                failed = True
                if isinstance(reason, EngineRefused):
                    self.notify(f"{reason}; the refit is repeated")
                else:
                    self.lost(client, str(reason))
        if any_rank(failed)[0]:
            self._outbox = None
            return None
        return [future.result() for future in asked.values()]

    def _compare(self, answers: list[Refitted]) -> None:
        """Hold every engine tensor's fingerprint to the trainer's. Collective."""
        assert self._outbox is not None
        given = gather(self._outbox.fingerprints())
        on_main(lambda: self._hold(answers, given))

    def _hold(self, answers: list[Refitted], given: list[dict[str, int]]) -> None:
        assert self._plan is not None
        expected: dict[str, int] = {}
        for found in given:
            for key, value in found.items():
                expected[key] = checksums.add(expected.get(key, 0), value)
        place = 0
        for (client, _), answer in zip(self._joined, answers, strict=True):
            for rank, report in enumerate(answer.ranks):
                source = self._plan.source(place)
                place += 1
                wrong = [
                    key
                    for key in {str(bucket) for bucket in self._plan.description.buckets}
                    if report.fingerprints.get(key, "0") != str(expected.get(f"{source}/{key}", 0))
                ]
                if wrong:
                    raise RefitError(
                        f"after a refit rank {rank} of {client.name} has other weights than the"
                        f" trainer in {_named(wrong)}"
                    )


def _named(buckets: list[str]) -> str:
    numbers = sorted(int(key) for key in buckets)
    names = {EMBEDDING: "the embedding", HEAD: "the head"}
    return ", ".join(names.get(number, f"layer {number}") for number in numbers)


def _measured(answers: list[Refitted]) -> dict[str, float]:
    ranks = [rank for answer in answers for rank in answer.ranks]
    return {
        "refit_bytes": float(max(rank.received_bytes for rank in ranks)),
        "refit_staging_bytes": float(max(rank.staging_bytes for rank in ranks)),
    }
