"""The files of a Hugging Face checkpoint: found, read, written and verified, tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from parallel.boxes import Box, within
from parallel.errors import UserError
from parallel.files import WEIGHTS_INDEX, naming, write_atomically
from parallel.hugging_face.config import TensorSpec

SHARD_BYTES = 4 << 30  # of a file at most, unless a single tensor is larger
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class WeightsError(UserError):
    """A Hugging Face checkpoint that cannot be taken, or was not written right; says all faults."""

    def __init__(self, title: str, faults: list[str]) -> None:
        shown = faults[:20] + [f"and {len(faults) - 20} more"] * (len(faults) > 20)
        super().__init__(f"{title}: {'; '.join(shown)}")


@dataclass(frozen=True)
class Stored:
    """Where a tensor is and what its file says of it; `dtype` in safetensors' own spelling."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """The tensors of a checkpoint's safetensors files, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Read the index and every file's header. `faults` tells what is wrong with them."""
        self.stored: dict[str, Stored] = {}
        self.faults: list[str] = []
        index = self._index(directory / WEIGHTS_INDEX)
        files = {directory / name for name in index.values()} or directory.glob("*.safetensors")
        for file in sorted(files):
            self._scan(file)
        if not self.stored and not self.faults:
            self.faults.append("no *.safetensors file")
        for name, file_name in index.items():
            if name in self.stored and self.stored[name].file.name != file_name:
                self.faults.append(
                    f"{WEIGHTS_INDEX}: {name} is said to be in {file_name}, but is in "
                    f"{self.stored[name].file.name}"
                )

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """One tensor or a box of it, on the CPU. Nothing stays mapped into memory once it is
        dropped."""
        with safe_open(self.stored[name].file, framework="pt") as file:
            return file.get_tensor(name) if box is None else file.get_slice(name)[within(box)]

    def missing(self, expected: Mapping[str, TensorSpec]) -> list[str]:
        """Faults of the tensors that should be there: absent, or of another shape."""
        faults = []
        for name, spec in expected.items():
            if name not in self.stored:
                faults.append(f"{name} is missing")
            elif (stored := self.stored[name]).shape != spec.shape:
                faults.append(
                    f"{stored.file.name}: {name} is {list(stored.shape)}, but should be "
                    f"{list(spec.shape)}"
                )
            elif stored.dtype not in DTYPES:
                faults.append(
                    f"{stored.file.name}: {name} is {stored.dtype}, but should be one of "
                    f"{', '.join(DTYPES)}"
                )
        return faults

    def unexpected(
        self, expected: Mapping[str, TensorSpec], ignored: Iterable[str] = ()
    ) -> list[str]:
        """Faults of the tensors that should not be there; `ignored` are patterns of names."""
        return [
            f"{stored.file.name}: {name} is no tensor of this model"
            for name, stored in self.stored.items()
            if name not in expected and not any(re.search(pattern, name) for pattern in ignored)
        ]

    def _index(self, path: Path) -> dict[str, str]:
        try:
            return dict(json.loads(path.read_text())["weight_map"])
        except FileNotFoundError:
            return {}  # a checkpoint of one file needs none
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.faults.append(f"{WEIGHTS_INDEX}: {error!r}")
            return {}

    def _scan(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name in self.stored:
                        first = self.stored[name].file.name
                        self.faults.append(f"{path.name}: {name} is also in {first}")
                    part = file.get_slice(name)
                    self.stored[name] = Stored(path, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            self.faults.append(f"{path.name}: {error}")


@dataclass(frozen=True)
class Position:
    """Where a tensor's bytes belong."""

    file: Path
    begin: int


def write(
    directory: Path,
    expected: Mapping[str, TensorSpec],
    stream: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write the expected tensors as they come, in any order, and give the SHA-256 of each.

    What goes where is decided beforehand, so that no more than one tensor is ever held.

    Raises:
        WeightsError: a tensor came twice, or not at all, or not as expected.
        OSError: such as a full disk.
    """
    places = _lay_out(directory, expected, shard_bytes)
    digests: dict[str, str] = {}
    for name, tensor in stream:
        fault = None
        if name not in places:
            fault = "is no tensor of this model"
        elif name in digests:
            fault = f"came twice, for {places[name].file.name}"
        elif (given := TensorSpec(tensor.dtype, tuple(tensor.shape))) != (spec := expected[name]):
            fault = f"is {given}, but should be {spec}, in {places[name].file.name}"
        if fault:
            raise WeightsError(f"cannot write {directory}", [f"{name} {fault}"])
        place, data = places[name], _bytes(tensor)
        digests[name] = hashlib.sha256(data).hexdigest()
        with naming(place.file), place.file.open("r+b") as file:
            file.seek(place.begin)
            file.write(data)
    absent = [f"{name} never came" for name in expected if name not in digests]
    if absent:
        raise WeightsError(f"cannot write {directory}", absent)
    for path in {place.file for place in places.values()}:
        _flush(path)
    return digests


def verify(directory: Path, expected: Mapping[str, TensorSpec], digests: Mapping[str, str]) -> None:
    """Read every tensor back and hold it against what was to be written.

    Raises:
        WeightsError: a tensor is missing, there twice, unknown, of another shape or type, not
            finite, or not the bytes that `write` was given.
    """
    files = WeightFiles(directory)
    faults = [*files.faults, *files.missing(expected), *files.unexpected(expected)]
    if not faults:
        for name, spec in expected.items():
            stored = files.stored[name]
            tensor = files.read(name)
            if DTYPES[stored.dtype] != spec.dtype:
                faults.append(f"{stored.file.name}: {name} is {stored.dtype}, not {spec.dtype}")
            elif hashlib.sha256(_bytes(tensor)).hexdigest() != digests[name]:
                faults.append(f"{stored.file.name}: {name} is not what was written")
            elif not torch.stack(tensor.aminmax()).isfinite().all():  # without a copy of it all
                faults.append(f"{stored.file.name}: {name} has NaN or infinite elements")
    if faults:
        raise WeightsError(f"{directory} was not written right", faults)


def _lay_out(
    directory: Path, expected: Mapping[str, TensorSpec], shard_bytes: int
) -> dict[str, Position]:
    """Create the files, with headers and without contents, and the index if they are several."""
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in expected.items():
        if shards[-1] and filled + _size(spec) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += _size(spec)
    places: dict[str, Position] = {}
    for number, shard in enumerate(shards, start=1):
        one_of = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        places.update(_create(directory / f"model{one_of}.safetensors", shard))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(map(_size, expected.values()))},
            "weight_map": {name: place.file.name for name, place in places.items()},
        }
        write_atomically(directory / WEIGHTS_INDEX, json.dumps(index, indent=2) + "\n")
    return places


def _create(path: Path, tensors: Mapping[str, TensorSpec]) -> dict[str, Position]:
    """A safetensors file of the right size: the header's length in 8 bytes, the header as JSON
    filled up to a multiple of 8, and room for one tensor after another, the widest types first so
    that all are aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        begins[name], end = end, end + _size(spec)
        header[name] = {
            "dtype": CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        file.truncate(first + end)
    return {name: Position(path, first + begin) for name, begin in begins.items()}


def _flush(path: Path) -> None:
    """To the disk, and out of the page cache, so that reading back reads what the disk has."""
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _size(spec: TensorSpec) -> int:
    return spec.dtype.itemsize * torch.Size(spec.shape).numel()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
