"""The fleet of a run's engines, from the trainer's side: which live, and with which weights."""

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

ATTEMPTS = 3  # of a refit that fails although no engine was lost
JOIN_SECONDS = 120.0  # in which ranks meet, or receive a message


class RefitError(EngineError):
    """A refit after which the engines do not have the trainer's weights."""


class _Gathering(NamedTuple):
    """The data every rank needs to join: the meeting, unless memory is shared, and the sizes."""

    meeting: Meeting | None
    sizes: tuple[int, ...]


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
        self.descriptions: dict[EngineClient, EngineDescription] = {}  # of live engines
        self.losses = 0
        self._clients: list[EngineClient] = []
        self._joined: list[tuple[EngineClient, str]] = []  # members of the plan, with `instance`
        self._store: dist.TCPStore | None = None
        self._policy: Policy | None = None
        self._ranks: list[tuple[str, int]] = []  # host and bytes of weights, by rank
        self._transport = ""
        self._outbox: Outbox | None = None
        self._plan: plans.Plan | None = None
        self.reports: list[Refitted] = []  # of the last refit, by engine; main rank only
        if is_main():
            self._clients = [EngineClient(address, settings) for address in addresses]

    def live(self) -> list[EngineClient]:
        """Return the engines that have the weights and are not lost. Main rank only."""
        return [client for client, _ in self._joined if client in self.descriptions]

    def lost(self, client: EngineClient, reason: str) -> None:
        """Have the launcher restart this engine. Main rank only."""
        if self.descriptions.pop(client, None) is not None:
            self.losses += 1
            client.give_up(reason)

    def refit(self, policy: Policy, version: int) -> dict[str, float]:
        """Send the policy's weights to every live engine; return metrics. Collective.

        When an engine is lost during a refit, the refit is repeated with the others, until all live
        engines have the same weights.

        Raises:
            RefitError: an engine has other weights than the trainer, or all attempts failed.
            EngineError: no engine started in time, or one is for another model.
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
                raise RefitError("the engines live but refits fail; see their logs")
        self.reports = answers
        if self.settings.check_refit:
            self._compare(answers)
        return broadcast(_measured(answers) if is_main() else None)

    def _gather(self) -> _Gathering | None:
        """Connect to engines that have (re)started, and wait for one where none is live.

        Returns None where the members are unchanged. Main rank only.
        """
        for client in self._clients:
            if client in self.descriptions:
                continue
            # Do not wait for a restart while another engine is live.
            if self._joined and self.descriptions and not client.replaced():
                continue
            described = client.connect()
            if described.model != model_digest(self.model):
                raise EngineError(
                    f"{client.name} was started for another model than this stage's; stop the"
                    " launcher that owns it, then resume"
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
        shared = self._choose_transport(local) == "shared_memory"
        return _Gathering(None if shared else self._meet(sizes, local), sizes)

    def _meet(self, sizes: tuple[int, ...], local: bool) -> Meeting:
        """Return a new meeting in the store that this rank hosts."""
        host = address_of(LOOPBACK if local else self.interface)
        if self._store is None or self._store.host != host:
            self._store = host_store(host, 0, timedelta(seconds=JOIN_SECONDS))
        ranks = self.layout.ranks
        return Meeting(
            host, self._store.port, secrets.token_hex(16), ranks, ranks + sum(sizes), JOIN_SECONDS
        )

    def _choose_transport(self, local: bool) -> str:
        """Return the transport; "auto" is shared memory where one host runs all and has room."""
        wanted, needed = self.settings.transport, sum(weights for _, weights in self._ranks)
        room = shared_memory_room() + (needed if self._transport == "shared_memory" else 0)
        if wanted == "auto":
            wanted = "shared_memory" if local and needed <= room else "messages"
        if wanted == "shared_memory" and not (local and needed <= room):
            why = (
                f"the weights need {needed >> 20} MiB of /dev/shm, {room >> 20} MiB available"
                if local
                else "engines and ranks are on several hosts"
            )
            raise EngineError(
                f"engine.transport is shared_memory, but {why}; set it to messages or auto"
            )
        self._transport = wanted
        return wanted

    def _join(self, gathering: _Gathering) -> list[Any] | None:
        """Have every rank and every engine make its part of the plan, and meet."""
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
        """Call every member while all ranks take part. Collective.

        Returns the members' answers on the main rank, an empty list on the others; or None on all
        ranks where anything failed. Members that did not answer are lost.
        """
        failed = False
        with ThreadPoolExecutor(max(1, len(self._joined))) as pool:
            asked = {client: pool.submit(ask, client) for client, _ in self._joined}
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

    def _compare(self, answers: list[Refitted]) -> None:
        """Compare every engine rank's fingerprints with the trainer's. Collective."""
        assert self._outbox is not None
        given = gather(self._outbox.fingerprints())
        on_main(lambda: self._check_fingerprints(answers, given))

    def _check_fingerprints(self, answers: list[Refitted], given: list[dict[str, int]]) -> None:
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
