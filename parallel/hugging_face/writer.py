"""Writing of a Hugging Face checkpoint tensor by tensor, and its verification."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from parallel.files import WEIGHTS_INDEX, naming, open_in_place, write_atomically
from parallel.hugging_face.config import TensorSpec
from parallel.hugging_face.files import (
    CODES,
    DTYPES,
    WeightFiles,
    WeightsError,
    bytes_of,
    is_finite,
)

SHARD_BYTES = 4 << 30  # of a file at most, unless a single tensor is larger
# A core computes SHA-256 about as fast as a disk reads; parallel file systems are faster.
VERIFY_THREADS = 4


def write(
    directory: Path,
    expected: Mapping[str, TensorSpec],
    stream: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write the expected tensors as they arrive, in any order; return the SHA-256 of each.

    Positions are fixed beforehand, so that only one tensor is held at a time.

    Raises:
        WeightsError: a tensor arrives twice, or not at all, or has another dtype or shape.
        OSError: such as a full disk.
    """
    refused = f"cannot write {directory}"
    places = _lay_out(directory, expected, shard_bytes)
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(1) as hasher:
        for name, tensor in stream:
            if name not in places:
                raise WeightsError(refused, [f"{name} is no tensor of this model"])
            path, begin = places[name]
            if name in digests:
                raise WeightsError(refused, [f"{name} arrived twice, for {path.name}"])
            if (actual := TensorSpec(tensor.dtype, tuple(tensor.shape))) != (
                spec := expected[name]
            ):
                wrong = f"{name} is {actual}, but should be {spec}, in {path.name}"
                raise WeightsError(refused, [wrong])
            data = bytes_of(tensor)
            digest = hasher.submit(hashlib.sha256, data)  # while the tensor is written
            with naming(path), open_in_place(path, "r+b") as file:
                file.seek(begin)
                file.write(data)
            digests[name] = digest.result().hexdigest()
    if absent := [f"{name} is missing" for name in expected if name not in digests]:
        raise WeightsError(refused, absent)
    for path in {path for path, _ in places.values()}:
        # Flushed to the disk and dropped from the page cache, so that `verify` reads the disk.
        with naming(path), path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digests


def verify(directory: Path, expected: Mapping[str, TensorSpec], digests: Mapping[str, str]) -> None:
    """Read every tensor back and compare it with what `write` was given.

    Raises:
        WeightsError: a tensor is missing, duplicate, unknown, of another shape or dtype, not
            finite, or has other bytes.
    """
    files = WeightFiles(directory)
    errors = files.errors + files.check(expected)
    if not errors:
        with ThreadPoolExecutor(VERIFY_THREADS) as pool:
            outcomes = pool.map(
                lambda name: _error(files, name, expected[name], digests[name]), expected
            )
            errors = [error for error in outcomes if error is not None]
    if errors:
        raise WeightsError(f"{directory} was not written right", errors)


def _error(files: WeightFiles, name: str, spec: TensorSpec, digest: str) -> str | None:
    """Return how a tensor on disk differs from the one that was written, or None."""
    file, dtype, *_ = files.stored[name]
    if dtype != CODES[spec.dtype]:
        return f"{file.name}: {name} is {dtype}, not {spec.dtype}"
    checksum, finite = hashlib.sha256(), True
    for piece in files.parts(name):
        checksum.update(bytes_of(piece))
        finite = finite and (dtype not in DTYPES or is_finite(piece))
    if checksum.hexdigest() != digest:
        return f"{file.name}: {name} is not what was written"
    return None if finite else f"{file.name}: {name} has NaN or infinite elements"


def _lay_out(
    directory: Path, expected: Mapping[str, TensorSpec], shard_bytes: int
) -> dict[str, tuple[Path, int]]:
    """Create the files, with headers and empty contents, and the index if there are several.

    Returns the file and offset of each tensor.
    """
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in expected.items():
        if shards[-1] and filled + _size(spec) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += _size(spec)
    places: dict[str, tuple[Path, int]] = {}
    for number, shard in enumerate(shards, start=1):
        one_of = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        places.update(_create(directory / f"model{one_of}.safetensors", shard))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(map(_size, expected.values()))},
            "weight_map": {name: path.name for name, (path, _) in places.items()},
        }
        write_atomically(directory / WEIGHTS_INDEX, json.dumps(index, indent=2) + "\n")
    return places


def _create(path: Path, tensors: Mapping[str, TensorSpec]) -> dict[str, tuple[Path, int]]:
    """Create a safetensors file of the right size; return the file and offset of each tensor.

    It has the header's length in 8 bytes, the header as JSON padded to a multiple of 8, and room
    for one tensor after another, the widest dtypes first so that all are aligned.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        begins[name], end = end, end + _size(spec)
        offsets = [begins[name], end]
        header[name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), open_in_place(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        data_start = file.tell()
        file.truncate(data_start + end)
    return {name: (path, data_start + begin) for name, begin in begins.items()}


def _size(spec: TensorSpec) -> int:
    return spec.dtype.itemsize * torch.Size(spec.shape).numel()
