"""The messages of a refit between ranks: over gloo on a CPU, NCCL on GPUs. NCCL has not been run.

Neither gloo nor torch.distributed's stores have a password: messages are for trusted networks
(docs/explanation/weight-sync.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from parallel.cpu.gloo import separate_group

POLL_SECONDS = 0.0005  # between looks at whether a GPU has sent or received
LOOK_SECONDS = 0.5  # between looks at whether a member is lost
LOST = "lost"  # the store's key for it

Addressed = tuple[torch.Tensor, int]  # with the rank that it goes to or comes from


class Meeting(msgspec.Struct, frozen=True):
    """A rendezvous of some of the trainer's and the engines' ranks, which are numbered together.

    Keys of the store begin with the unique `prefix`. Waiting for a rank ends after
    `timeout_seconds`.

    Example: 2 trainer ranks are members 0 and 1, and an engine of 2 ranks members 2 and 3:
    `Meeting("10.0.0.7", 29555, prefix, [0, 1, 2, 3], 120.0)`.
    """

    host: str
    port: int
    prefix: str
    members: list[int]
    timeout_seconds: float

    def store(self) -> dist.Store:
        """Connect to the store, which the trainer's main rank hosts."""
        timeout = timedelta(seconds=self.timeout_seconds)
        store = dist.TCPStore(
            self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        return dist.PrefixStore(self.prefix, store)

    def report_loss(self) -> None:
        """Have all members stop waiting for one another; for those that NCCL would keep waiting.

        Unblocks: `Messages.wait` and the connecting of every member, which then raise RuntimeError.
        """
        self.store().set(LOST, "")


class Messages:
    """A separate process group over trainers and engines; the engines' groups are unaffected.

    Waits for: all members of the meeting, in `__init__`.
    Unblocked by: the last of them to connect; RuntimeError after the meeting's timeout.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        self._place = {member: place for place, member in enumerate(meeting.members)}
        self._timeout = meeting.timeout_seconds
        self._store = meeting.store()
        self._looked = time.monotonic()
        place = self._place[rank]
        self._group = _open_group(meeting, self._store, place, device)
        # NCCL only enqueues, on a stream: its `wait` makes a stream wait, and never the host.
        self._enqueues = self._group.supports_coalescing

    def reaches(self, rank: int) -> bool:
        """Return whether a rank is a member."""
        return rank in self._place

    def start(
        self, sends: Sequence[Addressed] = (), receives: Sequence[Addressed] = ()
    ) -> MessageBatch:
        """Start sending and receiving; with NCCL all together, over the group's one communicator.

        Tensors to send must not change until the batch is done. Returns at once.

        Ranks do not deadlock if the batches have times that increase on every rank, and the two
        ends of each message have the same time: of the batches that have not ended, those of the
        least time have all earlier ones of their ranks behind them, so all their ends are there.
        """
        works: list[dist.Work] = []
        if self._enqueues:
            self._group._start_coalescing()
        for tensor, rank in sends:
            works.append(self._group.send([tensor], self._place[rank], 0))
        for tensor, rank in receives:
            works.append(self._group.recv([tensor], self._place[rank], 0))
        if self._enqueues:
            works = [self._group._end_coalescing()]
        return MessageBatch(self, works, [tensor for tensor, _ in (*sends, *receives)])

    def wait(self, work: dist.Work) -> None:
        """Hold the host until the work is done.

        Waits for: the other end of the message.
        Unblocked by: its `start`; another member's `report_loss`, or the timeout, raises.

        Raises:
            RuntimeError: a member is lost, or the other end did not come in time.
        """
        if self._enqueues:
            self._hold(work)
        work.wait()

    def close(self) -> None:
        """Leave the group; wait for nobody."""
        if self._enqueues:
            self._group.abort()  # which, other than `shutdown`, waits for no other member

    def _hold(self, work: dist.Work) -> None:
        """Wait for a GPU's work, but not for a member that is gone.

        NCCL never reports a lost peer. Its watchdog would end this process at the group's timeout,
        so the group is aborted before, by whoever notices.
        """
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            now = time.monotonic()
            if now > self._looked + LOOK_SECONDS:
                self._looked = now
                if self._store.check([LOST]):
                    self._fail("another rank of the refit is gone")
            if now > deadline:
                self._fail(f"no rank at the other end within {self._timeout:g} s")
            time.sleep(POLL_SECONDS)
        if (error := work.exception()) is not None:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self._store.set(LOST, "")
        self._group.abort()
        raise RuntimeError(f"refit: {reason}")


class MessageBatch:
    """Messages that were started together, with their buffers, which live until they are done."""

    def __init__(
        self, messages: Messages, works: list[dist.Work], buffers: list[torch.Tensor]
    ) -> None:
        self._messages, self._works, self._buffers = messages, works, buffers

    def wait(self) -> None:
        """Hold the host until all are done; raise RuntimeError where a rank is lost."""
        while self._works:
            self._messages.wait(self._works.pop(0))
        self._buffers.clear()


def _open_group(meeting: Meeting, store: dist.Store, place: int, device: torch.device) -> Any:
    """Return the group, once all members are there."""
    size, timeout = len(meeting.members), timedelta(seconds=meeting.timeout_seconds)
    if device.type != "cuda":
        return separate_group(store, place, size, timeout)
    # NCCL waits without end for a member that never comes, so all meet at the store first.
    if store.add("arrived", 1) == size:
        store.set("all", "")
    _await_all(store, meeting.timeout_seconds)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = 2 * timeout  # `Messages` gives up before the watchdog does
    with _without_teardown():
        group = nccl(store, place, size, options)
    # Point-to-point messages would otherwise create a communicator for every pair of ranks.
    group.eager_connect_single_device(device)
    return group


def _await_all(store: dist.Store, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not store.check(["all"]):
        if store.check([LOST]) or time.monotonic() > deadline:
            raise RuntimeError(f"refit: a rank is gone or did not come within {seconds:g} s")
        time.sleep(LOOK_SECONDS / 10)


@contextmanager
def _without_teardown() -> Iterator[None]:
    """Make a group created in the block outlive errors: its watchdog cleans up and ends nothing.

    torch 2.13 reads the mode when a group is created (ProcessGroupNCCL.cpp, CleanUpOnly); the
    trainer's own groups keep theirs.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
