"""Comparison of a checkpoint's tensors with its model, from the headers of its safetensors files.

A header is JSON after its length in 8 bytes, and names every tensor with its shape and its bytes in
the file. No tensor is read, and no library of arrays is imported.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from parallel.files import WEIGHTS_INDEX, unindexed_weights
from parallel.hugging_face.stored import Blocks, Stored, mtp_errors, unreadable
from parallel.hugging_face.text_model import StackError, text_tensors
from parallel.settings import ModelSettings
from parallel.weights.names import stored_tensors

SHOWN = 3  # tensors in a message
LONGEST_NAME = 200  # characters of a tensor's name in a message
MOST_BYTES = 100 << 20  # of a header, as safetensors reads it
LENGTH_BYTES = 8
MOST_DIMENSIONS, LONGEST_DIMENSION = 16, 1 << 63
# Bits of an element, by the dtypes that safetensors reads.
BITS = (
    {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64}
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
    | {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64}
)
PACKED = "_blocks"  # ends the name of a tensor in MXFP4, whose shape the import checks


class HeaderError(Exception):
    """A safetensors file without a header that can be read; the message says why."""


def tensors_violation(
    directory: Path, model: ModelSettings, blocks: Blocks | None
) -> tuple[Path, str] | None:
    """Return the first tensors of a checkpoint that are not its model's, or None.

    The path of a message is the file without a header, or the directory. `blocks` are the rows and
    columns that share a scale where the checkpoint is in FP8.

    Of `model.initial_weights` the tensors for multi-token prediction are checked too, which an
    export copies. Any other tensor that the model does not have is the import's business.
    """
    stored: dict[str, Stored] = {}
    for path in _files(directory):
        try:
            stored |= _header(path)
        except (OSError, HeaderError) as error:
            return path, f"{error}; download or export the file again"
    try:
        for tensor in [*text_tensors({name: header.shape for name, header in stored.items()})]:
            stored[tensor.name] = stored[tensor.stored]._replace(shape=tensor.shape)
    except StackError as error:
        return directory, f"{error}; download or export the file again"
    expected = {name: shape for name, shape, _ in stored_tensors(model)}
    differing = [*_differing(stored, expected, blocks)]
    if directory == model.initial_weights:
        differing += mtp_errors(stored, model.layers, blocks)
    if not differing:
        return None
    more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    return directory, (
        f"{len(differing)} tensors are not those of its config.json and the"
        f" run's model: {'; '.join(differing[:SHOWN])}{more}; name the checkpoint that belongs to"
        " this config.json, or download it again"
    )


def _differing(
    stored: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]], blocks: Blocks | None
) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in stored:
            if f"{name}{PACKED}" not in stored:
                yield f"{name} is missing"
        elif (tensor := stored[name]).shape != shape:
            yield f"{name} is {[*tensor.shape]} in {tensor.file.name} and should be {[*shape]}"
        elif (problem := unreadable(name, stored, blocks)) is not None:
            yield problem


def _files(directory: Path) -> Sequence[Path]:
    """Return the files that an index names, or those of a checkpoint without one."""
    if (index := directory / WEIGHTS_INDEX).is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / name for name in sorted(names)]
    return unindexed_weights(directory)


def _header(path: Path) -> dict[str, Stored]:
    """Return every tensor by its name.

    Raises:
        HeaderError: there is no header, it is damaged, or the file is shorter than it says.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not LENGTH_BYTES < LENGTH_BYTES + length <= min(size, MOST_BYTES):
            raise HeaderError(f"{size} bytes without a header, so no safetensors file")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text.decode())
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, AttributeError, RecursionError) as error:
        raise HeaderError(f"its header cannot be read: {error!r}") from error
    places = sorted((*_place(name, entry), name) for name, entry in entries)
    end = 0
    for begin, after, name in places:
        # The format allows no gaps and no overlaps: bytes of no tensor could hide another file.
        if begin != end:
            raise HeaderError(f"{_short(name)} begins at byte {begin}, and must at {end}")
        end = after
    if size < (whole := LENGTH_BYTES + length + end):
        raise HeaderError(f"{size} bytes, and its header says {whole}")
    begins = {name: LENGTH_BYTES + length + begin for begin, _, name in places}
    return {
        name: Stored(path, entry["dtype"], tuple(entry["shape"]), begins[name])
        for name, entry in entries
    }


def _place(name: str, entry: Any) -> tuple[int, int]:
    """Return the first byte of a tensor, and the byte after its last.

    Raises HeaderError where the entry of a header is none, or its parts disagree.
    """
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise HeaderError(f"{_short(name)}: unknown dtype {reprlib.repr(dtype)}")
    if not _are_lengths(shape):
        raise HeaderError(f"{_short(name)}: {reprlib.repr(shape)} is no shape")
    if not _are_lengths(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"{_short(name)}: {reprlib.repr(offsets)} are no data_offsets")
    begin, end = offsets
    if 8 * (end - begin) != prod(shape) * BITS[dtype]:
        stated = f"{end - begin} bytes, which {dtype} of shape {shape} does not take"
        raise HeaderError(f"{_short(name)} has {stated}")
    return begin, end


def _are_lengths(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value of JSON is a list of whole numbers from 0, as of bytes or elements."""
    return (
        isinstance(value, list)
        and len(value) <= MOST_DIMENSIONS
        and all(type(length) is int and 0 <= length < LONGEST_DIMENSION for length in value)
    )


def _short(name: str) -> str:
    return reprlib.repr(name) if len(name) > LONGEST_NAME else name
