"""A double of NCCL's process group: works that `wait` does not block for, and that land late.

As `ProcessGroupNCCL` of torch 2.13: operations between `_start_coalescing` and `_end_coalescing`
become one work; a rank's works run one after another, on its stream; all operations of a running
work progress together, each once the other end's work is running too; `wait` only makes a stream
wait; a lost peer is never reported.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel.weights.transport import Meeting


class LateWork:
    """Operations that run together: sends or receives, each with its peer."""

    def __init__(self, network: LateNetwork, operations: list[list[Any]]) -> None:
        self.network, self.open = network, operations

    def is_completed(self) -> bool:
        self.network.progress()
        return not self.open

    def wait(self) -> None:
        """Return at once: only a stream would wait."""

    def exception(self) -> None:
        return None


class LateNetwork:
    """The ranks of one group; `dead` ones never run anything, `store` is theirs."""

    def __init__(self, dead: frozenset[int] = frozenset()) -> None:
        self.lock = threading.Lock()
        self.dead, self.aborted = dead, set[int]()
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=5))
        self.running: dict[int, list[LateWork]] = {}
        self.largest_batch = 0

    def patched(self) -> Any:
        """Return a context in which `Messages` are over this network."""
        return mock.patch.multiple(
            "parallel.weights.transport",
            _open_group=lambda meeting, store, place, device: LateGroup(self, place),
            LOOK_SECONDS=0.05,
        )

    def meeting(self, ranks: int, seconds: float = 20.0) -> Meeting:
        network = self

        class Here(Meeting, frozen=True):
            def store(self) -> dist.Store:
                return network.store

        return Here("", 0, "", list(range(ranks)), seconds)

    def progress(self) -> None:
        with self.lock:
            while self._match():
                pass

    def _match(self) -> bool:
        """Move what both ends of are running; return whether anything moved."""
        moved = False
        for rank, works in self.running.items():
            if not works or rank in self.dead:
                continue
            for operation in [each for each in works[0].open if each[0] == "send"]:
                _, tensor, peer = operation
                theirs = self.running.get(peer, [])
                expected = ["receive", rank]
                found = [
                    each for each in (theirs[0].open if theirs else ()) if each[::2] == expected
                ]
                if not found or peer in self.dead:
                    continue
                found[0][1].copy_(tensor)
                works[0].open.remove(operation)
                theirs[0].open.remove(found[0])
                moved = True
        for works in self.running.values():
            while works and not works[0].open:
                works.pop(0)
        return moved


class LateGroup:
    """A rank's end of the group."""

    supports_coalescing = True

    def __init__(self, network: LateNetwork, rank: int) -> None:
        self.network, self.rank = network, rank
        with network.lock:
            network.running[rank] = []

    def _start_coalescing(self) -> None:
        self.operations: list[list[Any]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.operations.append(_Operation(["send", tensors[0], peer]))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.operations.append(_Operation(["receive", tensors[0], peer]))

    def _end_coalescing(self) -> LateWork:
        work = LateWork(self.network, self.operations)
        self.network.largest_batch = max(self.network.largest_batch, len(self.operations))
        with self.network.lock:
            self.network.running[self.rank].append(work)
        del self.operations
        return work

    def abort(self) -> None:
        self.network.aborted.add(self.rank)


class _Operation(list[Any]):
    """Compared by identity: tensors have no truth value."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
