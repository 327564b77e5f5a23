"""Host memory as CUDA is asked for it: pinned for copies, or mapped for kernels.

No GPU is needed: the calls of the CUDA runtime are recorded. That a kernel reads mapped memory is
not checked here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from parallel.errors import UserError
from parallel.model import host_state, offload
from parallel.model.host_state import HostState
from parallel.model.offload import HostMemory


class Runtime:
    """torch.cuda.cudart(), which registers memory unless it has an `error`."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, tuple[int, int]] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size, flags
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(offload, "device", lambda: torch.device("cuda", 3))
    return found


def test_mapped_memory_is_a_tensor_of_the_device_in_the_same_place(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(1000, pinned=True, mapped=True)
    address = memory.bytes.data_ptr()
    assert runtime.registered == {address: (1000, 2)}  # cudaHostRegisterMapped

    def as_tensor(data: Any, device: torch.device) -> torch.Tensor:
        # numpy reads the same description under its own name.
        assert data.__cuda_array_interface__["data"] == (address, False)
        assert device == torch.device("cuda", 3)
        data.__array_interface__ = data.__cuda_array_interface__
        return torch.from_numpy(np.asarray(data))

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    there = memory.on_device()
    assert there.dtype == torch.uint8
    assert (there.data_ptr(), there.nbytes) == (address, 1000)
    there[:] = 7
    assert bool((memory.bytes == 7).all())
    memory.close()
    assert not runtime.registered


def test_memory_that_cannot_be_mapped_is_refused(runtime: Runtime) -> None:
    runtime.error = 2
    with pytest.raises(UserError, match=r"^optimizer\.cpu_offload: CUDA cannot pin 3 MiB of host"):
        HostMemory(3 << 20, pinned=True, mapped=True)


def test_memory_for_copies_is_used_unpinned(
    runtime: Runtime, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime.error = 2
    memory = HostMemory(3 << 20, pinned=True)
    assert "offload: CUDA cannot pin 3 MiB" in capfd.readouterr().err
    memory.close()


def test_state_of_the_optimizer_is_in_mapped_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's kernels read and write it: pinned memory that is not mapped would not do."""
    asked: list[tuple[bool, bool]] = []

    def memory(size: int, pinned: bool, mapped: bool = False) -> HostMemory:
        asked.append((pinned, mapped))
        return HostMemory(size, pinned=False)

    monkeypatch.setattr(host_state, "HostMemory", memory)
    weight = torch.nn.Parameter(torch.ones(8))
    part = SimpleNamespace(
        optimizer=torch.optim.Adam([weight]),
        config=SimpleNamespace(use_precision_aware_optimizer=False),
        shard_fp32_from_float16_groups=[],
    )
    optimizer = SimpleNamespace(chained_optimizers=[part])
    monkeypatch.setattr(host_state, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(
        torch, "empty", lambda *size, dtype, device="": torch.zeros(size, dtype=dtype)
    )
    HostState(optimizer, 1.0)
    assert asked == [(True, True)]
    for moment in part.optimizer.state[weight].values():
        assert moment.untyped_storage().nbytes() == 2 * 256  # both in the one block
