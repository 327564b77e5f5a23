"""A refit maps only memory that a client with the token has named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from parallel.weights.mapping import SharedMemory, mapped, share


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
