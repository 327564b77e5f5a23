"""The mapping of a trainer rank's memory by engine ranks on its host: files, or CUDA IPC.

The handles come with `Join`, from a client that has the engine's token, and never from a store,
which has no password. CUDA IPC has not been run.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from parallel.errors import UserError
from parallel.machine.device import gpu_ordinals

Count = Annotated[int, msgspec.Meta(ge=0)]

BOOT = Path("/proc/sys/kernel/random/boot_id")
# Variables of torch's allocator; both names are read.
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def host_identity() -> str:
    """Return an identity that processes share if they can map each other's memory."""
    return f"{socket.gethostname()}/{BOOT.read_text().strip() if BOOT.exists() else ''}"


def shared_memory_room() -> int:
    """Return the free bytes of this host's shared memory; writing more kills the writer."""
    filesystem = os.statvfs("/dev/shm")
    return filesystem.f_bavail * filesystem.f_frsize


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
    """A GPU's memory: its UUID, and the arguments of `UntypedStorage._new_shared_cuda`.

    The first argument, the GPU's number, is the exporter's; an importer has its own.
    """

    gpu: str
    description: list[Any]


class SharedMemory(msgspec.Struct, frozen=True):
    """The memory that a rank shares: handles of storages, and its parameters' places."""

    storages: list[OpenFile | DeviceMemory]
    regions: dict[str, Region]


def share(parameters: dict[str, torch.Tensor]) -> SharedMemory:
    """Return handles by which this user's processes on this host can map the parameters' memory.

    Nothing is copied later: `mapped` shows every update. On a CPU the storages first move into
    shared memory; all views of them, such as an optimizer's, stay valid. A GPU's handles are valid
    while the storages live, so a storage that was freed and allocated again is shared again.

    Raises:
        UserError: torch's allocator uses expandable segments on a GPU.
    """
    numbers: dict[int, int] = {}
    handles: list[OpenFile | DeviceMemory] = []
    regions = {}
    for name, tensor in parameters.items():
        # Megatron's buffers hold many parameters: one handle maps them all.
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(numbers))
        dtype = str(tensor.dtype).removeprefix("torch.")
        offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
        regions[name] = Region(number, offset, shape, tensor.stride(), dtype)
        if number < len(handles):
            continue
        if storage.device.type == "cuda":
            handles.append(_share_gpu(storage))
            continue
        if not storage.is_shared():
            storage.share_memory_()
        handles.append(OpenFile(os.getpid(), *storage._share_fd_cpu_()))
    return SharedMemory(handles, regions)


def addresses(parameters: dict[str, torch.Tensor]) -> list[int]:
    """Return where the parameters are, which changes when their memory is allocated again."""
    return [tensor.data_ptr() for tensor in parameters.values()]


def _share_gpu(storage: Any) -> DeviceMemory:
    # torch 2.13 would export such segments by file descriptors, which an importer takes from this
    # process by ptrace's permission: kernels and containers refuse it to a sibling.
    if any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR):
        raise UserError(
            f"{ALLOCATOR[0]}: engines cannot map memory of expandable segments; remove"
            " expandable_segments:True, or set engine.transport to messages"
        )
    description = [*storage._share_cuda_()]
    [uuid] = [gpu for gpu, ordinal in gpu_ordinals().items() if ordinal == description[0]]
    # torch counts a handle as used until an importer has unmapped it, and would keep the memory of
    # one whose importer died. A refit ends its mappings before the memory is freed.
    _, _, _, _, counter, place, *_ = description
    torch.UntypedStorage._release_ipc_counter(counter, place, device=storage.device)
    return DeviceMemory(uuid, description)


def mapped(shared: SharedMemory) -> dict[str, torch.Tensor]:
    """Return the parameters of another process, in its memory, which is mapped while they live.

    Raises:
        OSError: the process has ended or its memory is unmapped.
        ValueError: a handle is not shared memory of the size it names, or is of a GPU that this
            process does not see.
    """
    storages = [_open(handle) for handle in shared.storages]
    parameters = {}
    for name, region in shared.regions.items():
        storage = storages[region.storage]
        empty = torch.empty(0, dtype=getattr(torch, region.dtype), device=storage.device)
        parameters[name] = empty.set_(storage, region.offset, region.shape, region.stride)
    return parameters


def _open(handle: OpenFile | DeviceMemory) -> Any:
    if isinstance(handle, DeviceMemory):
        ordinals = gpu_ordinals()
        if handle.gpu not in ordinals:
            raise ValueError(
                f"the trainer's GPU {handle.gpu} is not visible to this engine, only"
                f" {', '.join(ordinals) or 'none'}; add it to the end of CUDA_VISIBLE_DEVICES"
            )
        return torch.UntypedStorage._new_shared_cuda(ordinals[handle.gpu], *handle.description[1:])
    path = f"/proc/{handle.process}/fd/{handle.descriptor}"
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        # torch would extend a file that is too short, and create one that is missing.
        has_name = status.st_nlink or not stat.S_ISREG(status.st_mode)
        if has_name or status.st_size < handle.size:
            raise ValueError(f"{path} is no shared memory of {handle.size} bytes")
        path = f"/proc/self/fd/{descriptor}"
        return torch.UntypedStorage.from_file(path, shared=True, nbytes=handle.size)
    finally:
        os.close(descriptor)
