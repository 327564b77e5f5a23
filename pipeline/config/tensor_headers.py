"""Comparison of a checkpoint's tensors with its model, from the headers of its safetensors files.

A header is JSON after its length in 8 bytes, and names every tensor with its shape and its bytes in
the file. No tensor is read, and no library of arrays is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.files import WEIGHTS_INDEX
from parallel.hugging_face.text_model import text_tensors
from parallel.settings import ModelSettings
from parallel.weights.names import stored_tensors

SHOWN = 3  # tensors in a message
MOST_BYTES = 100 << 20  # of a header, as safetensors reads it
LENGTH_BYTES = 8
PACKED = "_blocks"  # ends the name of a tensor in MXFP4, whose shape the import checks

Shapes = dict[str, tuple[tuple[int, ...], str]]  # of every tensor, with the name of its file


class HeaderError(Exception):
    """A safetensors file without a header that can be read; the message says why."""


def tensors_violation(directory: Path, model: ModelSettings) -> tuple[Path, str] | None:
    """Return the first tensors of a checkpoint that are not its model's, or None.

    The path of a message is the file without a header, or the directory.

    A tensor that the model does not have, such as a scale or a draft model's, is the import's
    business.
    """
    stored: Shapes = {}
    for path in _files(directory):
        try:
            stored |= {name: (shape, path.name) for name, shape in _header(path)}
        except (OSError, HeaderError) as error:
            return path, f"{error}; download or export the file again"
    for own in [*text_tensors({name: shape for name, (shape, _) in stored.items()})]:
        stored[own.name] = own.shape, stored[own.stored][1]
    expected = {name: shape for name, shape, _ in stored_tensors(model)}
    if not (differing := [*_differing(stored, expected)]):
        return None
    more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    return directory, (
        f"{len(differing)} tensors are not those of its config.json and the"
        f" run's model: {'; '.join(differing[:SHOWN])}{more}; name the checkpoint that belongs to"
        " this config.json, or download it again"
    )


def _differing(stored: Shapes, expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in stored:
            if f"{name}{PACKED}" not in stored:
                yield f"{name} is missing"
        elif stored[name][0] != shape:
            found, file = stored[name]
            yield f"{name} is {[*found]} in {file} and should be {[*shape]}"


def _files(directory: Path) -> Sequence[Path]:
    """Return the files that an index names, or all that are there without one."""
    if (index := directory / WEIGHTS_INDEX).is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / name for name in sorted(names)]
    return sorted(directory.glob("*.safetensors"))


def _header(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of every tensor.

    Raises:
        HeaderError: there is no header, or the file is shorter than it says.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if not LENGTH_BYTES < LENGTH_BYTES + length <= min(size, MOST_BYTES):
            raise HeaderError(f"{size} bytes without a header, so no safetensors file")
        text = file.read(length)
    try:
        found: dict[str, Any] = json.loads(text)
        entries = [(name, each) for name, each in found.items() if name != "__metadata__"]
        ends = [each["data_offsets"][1] for _, each in entries]
        shapes = [(name, tuple(map(int, each["shape"]))) for name, each in entries]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise HeaderError(f"its header cannot be read: {error!r}") from error
    if size < (whole := LENGTH_BYTES + length + max(ends, default=0)):
        raise HeaderError(f"{size} bytes, and its header says {whole}")
    yield from shapes
