"""How the bytes of a refit travel: as messages between ranks, or not at all, where an engine maps
the trainer's memory.

Messages go over gloo on a CPU and NCCL on GPUs; memory is mapped as a file on a CPU and by CUDA IPC
on GPUs. What is on GPUs has not been run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Meeting(msgspec.Struct, frozen=True):
    """Where the trainer's ranks and the engines' meet; each is numbered in one row of both.

    Keys of the store lie below `secret`, which only those who were told can find. No wait for
    another rank is longer than `timeout_seconds`.
    """

    host: str
    port: int
    secret: str
    trainers: int
    ranks: int
    timeout_seconds: float

    def store(self) -> dist.Store:
        """The store, which the trainer's main rank hosts."""
        timeout = timedelta(seconds=self.timeout_seconds)
        store = dist.TCPStore(
            self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        return dist.PrefixStore(self.secret, store)


def store_host() -> dist.TCPStore:
    """A store for meetings, on a port of its own; it lives as long as this object."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def host_identity() -> str:
    """What is the same for processes that can map each other's memory."""
    return f"{socket.gethostname()}/{BOOT.read_text().strip() if BOOT.exists() else ''}"


def shared_memory_room() -> int:
    """Bytes that this host's shared memory can still take; writing more kills the writer."""
    found = os.statvfs("/dev/shm")
    return found.f_bavail * found.f_frsize


class Messages:
    """A process group of its own over trainers and engines; the engines' own groups stay alone."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        self.device = device
        kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        timeout = timedelta(seconds=meeting.timeout_seconds)
        self._group = kind(meeting.store(), rank, meeting.ranks, timeout)

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Start sending; the tensor must stay as it is until the work is done."""
        return self._group.send([tensor], rank, 0)

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Start receiving what that rank sends next."""
        return self._group.recv([tensor], rank, 0)


class Region(msgspec.Struct, frozen=True):
    """Where a parameter lies in one of its rank's shared storages."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class SharedMemory(msgspec.Struct, frozen=True):
    """What a rank lets others map: handles of its storages, and its parameters in them."""

    storages: list[Any]
    regions: dict[str, Region]


def share(parameters: dict[str, torch.Tensor]) -> SharedMemory:
    """Let other processes of this user on this host read the parameters where they are.

    On a CPU their storages are moved into shared memory, in place: every view of them, an
    optimizer's too, goes on showing them.
    """
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
    regions = {}
    for name, tensor in parameters.items():
        storage = tensor.untyped_storage()
        number, _ = storages.setdefault(storage._cdata, (len(storages), storage))
        regions[name] = Region(
            number,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            str(tensor.dtype).removeprefix("torch."),
        )
    return SharedMemory([_handle(storage) for _, storage in storages.values()], regions)


class Mapped:
    """The parameters of another process, read where they are."""

    def __init__(self, shared: SharedMemory) -> None:
        self._storages = [_open(handle) for handle in shared.storages]
        self._regions = shared.regions

    def __getitem__(self, name: str) -> torch.Tensor:
        region = self._regions[name]
        storage = self._storages[region.storage]
        empty = torch.empty(0, dtype=getattr(torch, region.dtype), device=storage.device)
        return empty.set_(storage, region.offset, region.shape, region.stride)


def _handle(storage: torch.UntypedStorage) -> list[Any]:
    if storage.device.type == "cuda":
        return ["cuda", *storage._share_cuda_()]
    if not storage.is_shared():
        storage.share_memory_()
    descriptor, size = storage._share_fd_cpu_()
    return ["cpu", os.getpid(), descriptor, size]


def _open(handle: Sequence[Any]) -> Any:
    kind, *rest = handle
    if kind == "cuda":
        return torch.UntypedStorage._new_shared_cuda(*rest)
    process, descriptor, size = rest
    # The file has no name any more; it can be reached through the process that has it open.
    path = f"/proc/{process}/fd/{descriptor}"
    return torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
