"""The residence of models on a device that they share with each other and with an engine.

A model's tensors have three components: weights, gradients, the optimizer's state. One leaves the
device by emptying its storages (`resize_(0)`), after a copy to the host; gradients are dropped, as
every update begins with zeros. The tensors stay the same objects, so all views of them, such as the
parameters in megatron-core's buffers and the optimizer's shards of them, are valid again once the
storages have their bytes back. megatron-core 0.19.2 has functions for this too, but its optimizer's
replaces `.data`, which separates an fp32 parameter from the buffer it is a view of.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from parallel.errors import UserError, report_notice
from parallel.machine.device import device, forget_error
from parallel.machine.gpus import wait_for_memory
from parallel.settings import EngineSettings

Component = Literal["weights", "gradients", "optimizer"]
ALL: frozenset[Component] = frozenset({"weights", "gradients", "optimizer"})
WEIGHTS: frozenset[Component] = frozenset({"weights"})
STATE: frozenset[Component] = frozenset({"weights", "optimizer"})  # of a checkpoint
NONE: frozenset[Component] = frozenset()

ALIGNMENT = 256  # bytes, of a storage's copy
HOST_REGISTER_MAPPED = 2  # CUDA's cudaHostRegisterMapped
ROOM_SECONDS = (
    120.0  # for an engine that has started to leave the device, or for its process to end
)


class HostMemory:
    """A block of host memory that CUDA copies to and from without staging.

    CUDA's kernels may read and write it too where it is `mapped`.
    """

    def __init__(self, size: int, pinned: bool, mapped: bool = False) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8)
        self._registered = False
        if not pinned or not size:
            return
        # Not torch's pinned allocator, which rounds every block up to a power of two.
        runtime: Any = torch.cuda.cudart()
        flags = HOST_REGISTER_MAPPED if mapped else 0
        failed = int(runtime.cudaHostRegister(self.bytes.data_ptr(), size, flags))
        self._registered = not failed
        if failed and mapped:
            raise UserError(
                f"optimizer.cpu_offload: CUDA cannot pin {size >> 20} MiB of host memory (error"
                f" {failed}); raise the limit of locked memory (ulimit -l), or lower the share"
            )
        if failed:
            forget_error()
            report_notice(
                f"offload: CUDA cannot pin {size >> 20} MiB of host memory (error {failed}); copies"
                " to and from the device are slower"
            )

    def on_device(self) -> torch.Tensor:
        """Return the bytes of mapped memory as a tensor of the device, in the same place."""
        if device().type != "cuda":
            return self.bytes
        # CUDA gives registered memory the host's address; torch takes it as memory of the device.
        self.__cuda_array_interface__ = {
            "shape": tuple(self.bytes.shape),
            "typestr": "|u1",
            "data": (self.bytes.data_ptr(), False),
            "version": 3,
        }
        return torch.as_tensor(self, device=device())

    def close(self) -> None:
        """Unpin the memory."""
        if self._registered:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.bytes.data_ptr())
        self._registered = False


@dataclass
class _Parked:
    """The storages of one component, away from the device or to leave it again, and their copy."""

    storages: list[torch.UntypedStorage] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    memory: HostMemory | None = None
    away: bool = False
    current: bool = False  # the copy equals what the storages hold

    def leave(self, storages: list[torch.UntypedStorage], copy: bool) -> None:
        """Empty the storages, after a copy to the host where `copy` is set."""
        same = [storage._cdata for storage in storages] == [
            storage._cdata for storage in self.storages
        ]
        if copy and not (self.current and same):
            self.storages, self.sizes = storages, [storage.nbytes() for storage in storages]
            total = sum(aligned(size) for size in self.sizes)
            if self.memory is None or len(self.memory.bytes) < total:
                if self.memory is not None:
                    self.memory.close()
                self.memory = None  # freed before the larger one is allocated
                self.memory = HostMemory(total, pinned=device().type == "cuda")
            for view, saved in self._pairs():
                saved.copy_(view, non_blocking=True)
            _synchronize()
            self.current = True
        elif not same:
            self.storages, self.sizes = storages, [storage.nbytes() for storage in storages]
        for storage in self.storages:
            storage.resize_(0)
        self.away = True

    def come_back(self, copy: bool) -> None:
        """Give the storages their bytes back: the copy, or zeros."""
        for storage, size in zip(self.storages, self.sizes, strict=True):
            storage.resize_(size)
        self.away = False
        if copy:
            for view, saved in self._pairs():
                view.copy_(saved, non_blocking=True)
            _synchronize()
        else:
            for storage, size in zip(self.storages, self.sizes, strict=True):
                _bytes(storage, size).zero_()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of every storage with the bytes of its copy."""
        assert self.memory is not None
        offset = 0
        for storage, size in zip(self.storages, self.sizes, strict=True):
            yield _bytes(storage, size), self.memory.bytes[offset : offset + size]
            offset += aligned(size)


class Residency:
    """The components of one model that are on the device, at first all of them.

    Without an active `share` nothing moves, and every call returns at once.

    Example: a trained policy of 1 GiB of bf16 weights, beside an engine that shares its GPU.

        an update   weights 1, gradients 2 and the optimizer 6 GiB are on the device
        a refit     weights alone: `share.only(model)`
        sampling    none; 7 GiB are copied to the host, and gradients are dropped
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        modules: Sequence[Any] = (),
        optimizer: Any = None,
        on_host: torch.Tensor | None = None,
    ) -> None:
        """Take a model's chunks; of one that trains also its DDP modules and its optimizer.

        Optimizer state in `on_host` is host memory, whatever its device: it stays there.
        """
        self._chunks, self._modules, self._optimizer = chunks, modules, optimizer
        self._on_host = on_host
        self.trains = optimizer is not None
        self.keeps_copy = True  # False: whoever needs the model fills its weights again
        self.share = DeviceShare()
        self._parked: dict[Component, _Parked] = {component: _Parked() for component in ALL}

    @property
    def on_device(self) -> frozenset[Component]:
        """The components that are on the device; a model that does not train has weights only."""
        mine = ALL if self.trains else WEIGHTS
        return frozenset(component for component in mine if not self._parked[component].away)

    @property
    def moves(self) -> bool:
        """True where the model leaves the device for others."""
        return self in self.share.movable

    def hold(self, components: Collection[Component] = WEIGHTS) -> None:
        """Bring components to the device, for a pass or an update, as `DeviceShare.hold`."""
        if self.share.active:
            self.share.hold(self, components)

    def written(self) -> None:
        """Note that the weights changed since they were copied to the host."""
        self._parked["weights"].current = False

    def place(self, components: Collection[Component]) -> None:
        """Have exactly these components on the device; raise UserError where they find no room."""
        parked = self._parked
        before = self.on_device
        if gone := [component for component in sorted(before) if component not in components]:
            if "gradients" in gone:
                self._optimizer.zero_grad()  # drops what is not in the buffers
            sets = self._storages()
            for component in gone:
                parked[component].leave(sets[component], copy=self._copies(component))
        coming = [component for component in sorted(components) if parked[component].away]
        needed = sum(sum(parked[component].sizes) for component in coming)
        _wait_for_room(needed, self.share.room_seconds)
        for component in coming:
            parked[component].come_back(copy=self._copies(component))
            # The weights of a model that trains change with every update, others' by `written`.
            parked[component].current = not self.trains

    def _copies(self, component: Component) -> bool:
        return self.keeps_copy and component != "gradients"

    def _storages(self) -> dict[Component, list[torch.UntypedStorage]]:
        """Return the device's storages by component; a storage of two belongs to the first.

        An fp32 weight is its own master in the optimizer.
        """
        seen: set[int] = set()
        if self._on_host is not None:
            seen.add(self._on_host.untyped_storage()._cdata)

        def unseen(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
            storages = []
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if tensor.device.type == device().type and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    storages.append(storage)
            return storages

        weights = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        weights += [buffer for chunk in self._chunks for buffer in chunk.buffers()]
        buffers = [
            buffer
            for module in self._modules
            for buffer in (*module.buffers, *module.expert_parallel_buffers)
        ]
        weights += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        return {
            "weights": unseen(weights),
            "gradients": unseen(buffer.grad_data for buffer in buffers),
            "optimizer": unseen(_state(self._optimizer)),
        }


class DeviceShare:
    """The models of one rank that take turns on its device; without a device nothing moves.

    `active` where models move at all. Models that train move where an engine shares the device,
    which has `room_seconds` to leave it.

    Example: a policy that trains and a reference, without an engine: only the reference moves. It
    comes to the device with its `hold`, and leaves it with the policy's next.
    """

    def __init__(
        self, active: bool = False, engine: bool = False, room_seconds: float = ROOM_SECONDS
    ) -> None:
        self.active, self.engine, self.room_seconds = active, engine, room_seconds
        self.members: list[Residency] = []
        self.movable: list[Residency] = []
        self.seconds = 0.0  # of moving, since the last `take_seconds`
        self._together = False

    @classmethod
    def beside(cls, engine: EngineSettings) -> DeviceShare:
        """Return the share of this rank's device, beside engines with these settings."""
        kind = device().type
        shared = engine.sleeps_on(kind)
        # An engine that is restarted during its turn is not asked to sleep: it leaves the device
        # once it has started.
        seconds = ROOM_SECONDS + (engine.start_seconds if shared else 0)
        return cls(active=kind == "cuda", engine=shared, room_seconds=seconds)

    def add(self, model: Residency) -> None:
        """Add a model; it leaves the device until it is needed, unless it trains undisturbed."""
        if not self.active:
            return
        model.share = self
        self.members.append(model)
        if self.engine or not model.trains:
            self.movable.append(model)
            self._place(model, NONE)

    def hold(self, model: Residency, components: Collection[Component]) -> None:
        """Bring at least `components` of a model to the device; others make room.

        Gradients are worth nothing between an update and the next, so a forward pass of any model
        may take their room. Where the optimizer is needed, an update follows, and all other models
        leave; else only those leave that do not train.
        """
        if not self.active:
            return
        if self._together:
            missing = set(components) - model.on_device - {"gradients"}
            assert not missing, f"{missing} of a model that is not among those held together"
            return
        updates = "optimizer" in components
        for other in self.movable:
            if other is not model:
                keeps = other.on_device - {"gradients"} if other.trains and not updates else NONE
                self._place(other, keeps)
        if model in self.movable:
            keeps = model.on_device if updates else model.on_device - {"gradients"}
            self._place(model, keeps | set(components))

    def only(
        self, model: Residency | None = None, components: Collection[Component] = WEIGHTS
    ) -> None:
        """Have only these components of one model beside an engine; free the cache."""
        if not self.engine:
            return
        for other in self.movable:
            if other is not model:
                self._place(other, NONE)
        if model in self.movable and model is not None:
            self._place(model, components)
        release_cache()

    @contextmanager
    def together(
        self, models: Iterable[Residency], components: Collection[Component]
    ) -> Iterator[None]:
        """Have these components of several models on the device, as a checkpoint needs them."""
        if not self.active:
            yield
            return
        held = list(models)
        for other in self.movable:
            if other not in held:
                self._place(other, NONE)
        for model in held:
            if model in self.movable:
                self._place(model, frozenset(components) if model.trains else WEIGHTS)
        self._together = True
        try:
            yield
        finally:
            self._together = False

    def take_seconds(self) -> float:
        """Return the seconds spent moving since the last call."""
        spent, self.seconds = self.seconds, 0.0
        return spent

    def _place(self, model: Residency, components: Collection[Component]) -> None:
        if model.on_device == frozenset(components):
            return
        start = time.perf_counter()
        model.place(components)
        self.seconds += time.perf_counter() - start


def release_cache() -> None:
    """Return the allocator's unused memory to the device, for other processes."""
    if device().type == "cuda":
        torch.cuda.ipc_collect()  # storages that engines had mapped until the last refit
        torch.cuda.empty_cache()


def _wait_for_room(needed: int, seconds: float) -> None:
    """Wait until the device has room for what comes back; an engine may still be leaving it.

    Waits for: free memory on this rank's device, at most `seconds`.
    Unblocked by: the engine's sleep, or the end of a process of it that died.
    """
    if device().type != "cuda" or not needed:
        return
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if cached + torch.cuda.mem_get_info()[0] >= needed:
        return
    release_cache()
    if not wait_for_memory(lambda: [torch.cuda.mem_get_info()[0]], needed, seconds):
        free = torch.cuda.mem_get_info()[0]
        raise UserError(
            f"the device has {free >> 20} MiB free and the trainer's offloaded model needs"
            f" {needed >> 20} MiB: an engine did not leave it within {seconds:g} s (see its"
            " log); lower engine.kv_cache_mebibytes, or set engine.placement: own"
        )


def _synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (size,), (1,))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's parts: parameters it updates, and their state."""
    for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(chained, "optimizer", None)
        if inner is None:  # no optimizer, or a part without parameters
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (tensor for tensor in state.values() if torch.is_tensor(tensor))
