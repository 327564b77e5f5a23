"""A refit maps only memory that a client has named; its group over NCCL ends no process."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from parallel.weights.mapping import SharedMemory, mapped, share
from parallel.weights.transport import Meeting, _open_group

ERROR_MODE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def received(shared: Any) -> SharedMemory:
    """Return an engine's decoding of a message."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=SharedMemory)


def test_shared_parameters_are_mapped_and_not_copied() -> None:
    flat = torch.arange(24.0)
    parameters = {
        "a": flat[:6].view(2, 3),
        "b": flat[6:].view(3, 6).t(),
        "c": torch.ones(3).bfloat16(),
    }
    found = mapped(received(share(parameters)))
    for name, parameter in parameters.items():
        assert torch.equal(found[name], parameter)
        assert found[name].dtype == parameter.dtype
    flat.mul_(2)
    assert torch.equal(found["b"], parameters["b"])


def test_a_mapping_reads_files_that_are_open_and_changes_none(tmp_path: Path) -> None:
    """Mapping refuses a size beyond the file's, and a file that has a name."""
    here = os.getpid()
    small, absent = tmp_path / "small", tmp_path / "absent"
    small.write_bytes(b"17 bytes of text.")
    with small.open("r+b") as file, small.open("rb") as readable:
        for handle in (
            ["cpu", "self", f"../../../{small}", 1 << 20],
            ["cpu", "self", f"../../../{absent}", 1 << 20],
            ["cpu", here, file.fileno(), 1 << 20],
            ["cpu", here, readable.fileno(), 17],
            ["cpu", here, 9999, 17],
            ["cpu", here, -1, 17],
            ["cpu", f"{here}", file.fileno(), 17],
        ):
            with pytest.raises((OSError, ValueError)):
                mapped(received({"storages": [handle], "regions": {}}))
    assert small.read_bytes() == b"17 bytes of text."
    assert not absent.exists()


class Nccl:
    """ProcessGroupNCCL as it is constructed, which torch's builds for CPUs lack."""

    made: ClassVar[list[Nccl]] = []

    class Options(Backend.Options):  # torch's own fields
        def __init__(self) -> None:
            super().__init__("nccl")

    def __init__(self, store: dist.Store, rank: int, size: int, options: Nccl.Options) -> None:
        self.rank, self.size, self.timeout = rank, size, options._timeout
        self.error_mode = os.environ.get(ERROR_MODE)
        self.connected: torch.device | None = None
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device


@pytest.mark.parametrize("users", [None, "3"])
def test_a_group_over_nccl_outlives_what_its_watchdog_would_end(
    users: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Messages` gives up first, and an error ends no process: the refit is repeated."""
    monkeypatch.setattr(Nccl, "made", [])
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    if users is None:
        monkeypatch.delenv(ERROR_MODE, raising=False)
    else:
        monkeypatch.setenv(ERROR_MODE, users)
    gpu = torch.device("cuda", 3)
    group = _open_group(Meeting("", 0, "", [5], 20.0), dist.HashStore(), 0, gpu)
    assert Nccl.made == [group]
    assert (group.rank, group.size) == (0, 1)
    assert group.timeout > timedelta(seconds=20)
    assert group.error_mode == "2"  # CleanUpOnly
    assert os.environ.get(ERROR_MODE) == users  # the trainer's own groups keep theirs
    assert group.connected == gpu  # one communicator, and none for each pair of ranks
    with pytest.raises(RuntimeError, match=r"a rank is gone or did not come within 0\.1 s"):
        _open_group(Meeting("", 0, "", [5, 6], 0.1), dist.HashStore(), 0, gpu)
    assert Nccl.made == [group]
