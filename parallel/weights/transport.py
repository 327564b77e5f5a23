"""The transport of a refit's bytes: messages between ranks, or mapped memory of the trainer.

Messages go over gloo on a CPU and NCCL on GPUs; memory is mapped as a file on a CPU and by CUDA IPC
on GPUs. The GPU paths have not been run.

Neither gloo nor torch.distributed's stores have a password: messages are for trusted networks
(docs/explanation/weight-sync.md). The handles that an engine maps are therefore never read from a
store; they come with `Join`, from a client that has the engine's token.
"""

from __future__ import annotations

import os
import socket
import stat
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist

from parallel.cpu.gloo import separate_group

Count = Annotated[int, msgspec.Meta(ge=0)]

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Meeting(msgspec.Struct, frozen=True):
    """A rendezvous of the trainer's and the engines' ranks, numbered consecutively.

    Keys of the store begin with the unique `prefix`. Waiting for a rank ends after
    `timeout_seconds`.
    """

    host: str
    port: int
    prefix: str
    trainers: int
    ranks: int
    timeout_seconds: float

    def store(self) -> dist.Store:
        """Connect to the store, which the trainer's main rank hosts."""
        timeout = timedelta(seconds=self.timeout_seconds)
        store = dist.TCPStore(
            self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        return dist.PrefixStore(self.prefix, store)


def host_identity() -> str:
    """Return an identity that processes share if they can map each other's memory."""
    return f"{socket.gethostname()}/{BOOT.read_text().strip() if BOOT.exists() else ''}"


def shared_memory_room() -> int:
    """Return the free bytes of this host's shared memory; writing more kills the writer."""
    found = os.statvfs("/dev/shm")
    return found.f_bavail * found.f_frsize


class Messages:
    """A separate process group over trainers and engines; the engines' groups are unaffected."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        self.device = device
        make: Any = dist.ProcessGroupNCCL if device.type == "cuda" else separate_group
        timeout = timedelta(seconds=meeting.timeout_seconds)
        self._group = make(meeting.store(), rank, meeting.ranks, timeout)

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Start sending; the tensor must not change until the work is done."""
        return self._group.send([tensor], rank, 0)

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Start receiving the next tensor from a rank."""
        return self._group.recv([tensor], rank, 0)


class Region(msgspec.Struct, frozen=True):
    """The place of a parameter in one of its rank's shared storages."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class OpenFile(msgspec.Struct, frozen=True, array_like=True, tag="cpu"):
    """A rank's memory: an unnamed file that its process has open."""

    process: Count
    descriptor: Count
    size: Count


class DeviceMemory(msgspec.Struct, frozen=True, array_like=True, tag="cuda"):
    """A device's memory: the arguments of `UntypedStorage._new_shared_cuda`."""

    description: list[Any]


class SharedMemory(msgspec.Struct, frozen=True):
    """The memory that a rank shares: handles of storages, and its parameters' places."""

    storages: list[OpenFile | DeviceMemory]
    regions: dict[str, Region]


def share(parameters: dict[str, torch.Tensor]) -> SharedMemory:
    """Return handles by which this user's processes on this host can map the parameters' memory.

    Nothing is copied later: `mapped` shows every update. On a CPU the storages first move into
    shared memory; all views of them, such as an optimizer's, stay valid.
    """
    numbers: dict[int, int] = {}
    handles: list[OpenFile | DeviceMemory] = []
    regions = {}
    for name, tensor in parameters.items():
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(numbers))
        dtype = str(tensor.dtype).removeprefix("torch.")
        offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
        regions[name] = Region(number, offset, shape, tensor.stride(), dtype)
        if number < len(handles):
            continue
        if storage.device.type == "cuda":
            handles.append(DeviceMemory([*storage._share_cuda_()]))
            continue
        if not storage.is_shared():
            storage.share_memory_()
        handles.append(OpenFile(os.getpid(), *storage._share_fd_cpu_()))
    return SharedMemory(handles, regions)


def mapped(shared: SharedMemory) -> dict[str, torch.Tensor]:
    """Return the parameters of another process, in its memory, which is mapped while they live.

    Raises:
        OSError: the process has ended or its memory is unmapped.
        ValueError: a handle is not shared memory of the size it names.
    """
    storages = [_open(handle) for handle in shared.storages]
    found = {}
    for name, region in shared.regions.items():
        storage = storages[region.storage]
        empty = torch.empty(0, dtype=getattr(torch, region.dtype), device=storage.device)
        found[name] = empty.set_(storage, region.offset, region.shape, region.stride)
    return found


def _open(handle: OpenFile | DeviceMemory) -> Any:
    if isinstance(handle, DeviceMemory):
        return torch.UntypedStorage._new_shared_cuda(*handle.description)
    path = f"/proc/{handle.process}/fd/{handle.descriptor}"
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        # torch would extend a file that is too short, and create one that is missing.
        named = found.st_nlink or not stat.S_ISREG(found.st_mode)
        if named or found.st_size < handle.size:
            raise ValueError(f"{path} is no shared memory of {handle.size} bytes")
        path = f"/proc/self/fd/{descriptor}"
        return torch.UntypedStorage.from_file(path, shared=True, nbytes=handle.size)
    finally:
        os.close(descriptor)
