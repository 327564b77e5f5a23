"""The files of a Hugging Face checkpoint, read tensor by tensor."""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from parallel.errors import UserError
from parallel.files import HUGGING_FACE, WEIGHTS_INDEX, is_file_name, naming, unindexed_weights
from parallel.hugging_face import mxfp4
from parallel.hugging_face.block_scales import BlockScales, block_scales
from parallel.hugging_face.config import TensorSpec
from parallel.hugging_face.stored import (
    CODE,
    FLOATS,
    SUFFIX,
    Blocks,
    Stored,
    scales_of,
    unreadable,
)
from parallel.hugging_face.text_model import StackError, text_tensors
from parallel.weights.boxes import Box, within

PART_BYTES = 8 << 20  # of a part of a tensor; 1 MiB at a time reads a disk at half its speed
DTYPES = dict(zip(FLOATS, (torch.float32, torch.bfloat16, torch.float16), strict=True))
# Of quantized tensors, which no model is loaded from.
PACKED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
CODES = {dtype: code for code, dtype in (DTYPES | PACKED).items()}


class WeightsError(UserError):
    """A Hugging Face checkpoint that cannot be read or was not written right, with all errors."""

    def __init__(self, title: str, errors: list[str]) -> None:
        shown = errors[:20] + [f"and {len(errors) - 20} more"] * (len(errors) > 20)
        super().__init__(f"{title}: {'; '.join(shown)}")


class WeightFiles:
    """The tensors of a checkpoint's safetensors files, read one at a time.

    Of a vision-language model's, those of the text model have the names of its own checkpoints.
    """

    def __init__(self, directory: Path) -> None:
        """Read the index and every file's header; `errors` lists what is wrong with them."""
        self.stored: dict[str, Stored] = {}
        self.errors: list[str] = []
        self._scales: BlockScales | None = None
        with suppress(OSError, ValueError, TypeError):  # a directory without a config.json has none
            try:
                self._scales = block_scales(directory)
            except RecursionError as error:
                self.errors.append(f"{HUGGING_FACE}: {error!r}")
        index: dict[str, str] = {}  # a checkpoint of one file has none
        try:
            with suppress(FileNotFoundError):
                index = _index(directory / WEIGHTS_INDEX)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.errors.append(f"{WEIGHTS_INDEX}: {error!r}")
        files = {directory / name for name in index.values()} or unindexed_weights(directory)
        for path in sorted(files):
            try:
                with safe_open(path, framework="pt") as file:  # checks the header
                    begin, header = _header(path)
                    for name in file.keys():  # noqa: SIM118
                        if name in self.stored:
                            earlier_file = self.stored[name].file.name
                            self.errors.append(f"{path.name}: {name} is also in {earlier_file}")
                        header_slice = file.get_slice(name)
                        start = begin + header[name]["data_offsets"][0]
                        shape = tuple(header_slice.get_shape())
                        self.stored[name] = Stored(path, header_slice.get_dtype(), shape, start)
            except (OSError, SafetensorError) as error:
                self.errors.append(f"{path.name}: {error}")
        if not self.stored and not self.errors:
            self.errors.append("no *.safetensors file")
        for name, expected in index.items():
            if name in self.stored and (actual := self.stored[name].file.name) != expected:
                misplaced = f"{name} should be in {expected}, but is in {actual}"
                self.errors.append(f"{WEIGHTS_INDEX}: {misplaced}")
        try:
            self._show_text_tensors()
        except StackError as error:
            self.errors.append(str(error))

    def _show_text_tensors(self) -> None:
        """Name the text model's tensors in `stored`, instead of those that hold them."""
        outer = dict(self.stored)
        for text_tensor in text_tensors({name: stored.shape for name, stored in outer.items()}):
            self.stored.pop(text_tensor.stored, None)
            outer_tensor = outer[text_tensor.stored]
            # `check` refuses all other dtypes.
            kind = (DTYPES | PACKED).get(outer_tensor.dtype, torch.uint8)
            start = outer_tensor.start + text_tensor.offset * kind.itemsize
            self.stored[text_tensor.name] = outer_tensor._replace(
                shape=text_tensor.shape, start=start
            )

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a tensor or a box of it, on the CPU; its file is unmapped with the tensor.

        Weights with scales for their blocks are returned in fp32, experts in MXFP4 in bf16.
        """
        if self._packs(name):
            return self._unpacked(name, box)
        if (blocks := self.blocks_of(name)) is None:
            return self._stored(name, box)
        whole = self.stored[name].shape
        box = ((0,) * len(whole), whole) if box is None else box
        scales = self._stored(name + SUFFIX, blocks.cover(box))
        return blocks.restored(self._stored(name, box), scales, box)

    def _stored(self, name: str, box: Box | None) -> torch.Tensor:
        """Read the rows of a box, and return the box of them.

        Read, not mapped: to open a file with safetensors parses its header, which takes 1 ms where
        it has 1,300 tensors, and pages that are mapped count as the process's memory.
        """
        path, dtype, shape, start = self.stored[name]
        offsets, sizes = box or ((0,) * len(shape), shape)
        rows = torch.empty((*sizes[:1], *shape[1:]), dtype=(DTYPES | PACKED)[dtype])
        start += offsets[0] * math.prod(shape[1:]) * rows.itemsize if shape else 0
        _read(path, start, rows)
        return rows[(slice(None), *within((offsets[1:], sizes[1:])))] if shape else rows

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor that can be `read`."""
        return self.stored[name + mxfp4.SCALES * self._packs(name)].file

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor as it is stored, flat, in parts of `PART_BYTES` at most.

        All are in the same memory: a part is gone when the next is asked for.
        """
        path, dtype, shape, start = self.stored[name]
        kind, left = (DTYPES | PACKED)[dtype], math.prod(shape)
        memory = torch.empty(min(left, PART_BYTES // kind.itemsize), dtype=kind)
        while left:
            piece = memory[:left]
            _read(path, start, piece)
            yield piece
            start += piece.nbytes
            left -= len(piece)

    def blocks_of(self, name: str) -> BlockScales | None:
        """Return the blocks of a tensor in FP8 that share a scale, None for any other tensor."""
        scaled = self.stored[name].dtype == CODE and name + SUFFIX in self.stored
        return self._scales if scaled else None

    @property
    def block_size(self) -> Blocks | None:
        """The rows and columns that share a scale, None where config.json states none."""
        return None if self._scales is None else self._scales.size

    def _packs(self, name: str) -> bool:
        """Return whether a tensor is here in MXFP4."""
        return name not in self.stored and name + mxfp4.SCALES in self.stored

    def _unpacked(self, name: str, box: Box | None) -> torch.Tensor:
        whole = mxfp4.unpacked_shape(self.stored[name + mxfp4.SCALES].shape)
        box = ((0,) * len(whole), whole) if box is None else box
        offsets, sizes = mxfp4.packed_box(box)
        blocks = self._stored(name + mxfp4.BLOCKS, ((*offsets, 0), (*sizes, mxfp4.INPUTS // 2)))
        return mxfp4.unpacked(blocks, self._stored(name + mxfp4.SCALES, (offsets, sizes)), box)

    def _as_packed(self, expected: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Return the expected tensors, those in MXFP4 as they are stored."""
        specs: dict[str, TensorSpec] = {}
        for name, spec in expected.items():
            if len(spec.shape) != 3 or not self._packs(name):
                specs[name] = spec
                continue
            for end, shape in mxfp4.packed_shapes(spec.shape).items():
                specs[name + end] = TensorSpec(torch.uint8, shape)
        return specs

    def check(self, expected: Mapping[str, TensorSpec], ignored: Iterable[str] = ()) -> list[str]:
        """Return an error for each tensor that is missing, has another shape, or is not expected.

        Names that match the patterns `ignored` may also be there.
        """
        errors = []
        expected = self._as_packed(expected)
        for name, spec in expected.items():
            if name not in self.stored:
                errors.append(f"{name} is missing")
                continue
            file, dtype, shape, _ = self.stored[name]
            if shape != spec.shape:
                wrong = f"{list(shape)}, but should be {list(spec.shape)}"
                errors.append(f"{file.name}: {name} is {wrong}")
            elif dtype != CODES.get(spec.dtype) and (
                problem := unreadable(name, self.stored, self.block_size)
            ):
                errors.append(problem)
        for name, stored in self.stored.items():
            names = (name, scales_of(name, self.stored)) if self._scales else (name,)
            if expected.keys().isdisjoint(names) and not any(
                re.search(pattern, name) for pattern in ignored
            ):
                errors.append(f"{stored.file.name}: {name} is no tensor of this model")
        return errors


def _index(path: Path) -> dict[str, str]:
    """Return the file of each tensor of an index.

    Raises:
        OSError: it cannot be read.
        KeyError, RecursionError, TypeError, ValueError: it is none, or names other than files.
    """
    weight_map = dict(json.loads(path.read_text())["weight_map"])
    if outside := [name for name in weight_map.values() if not is_file_name(name)]:
        raise ValueError(f"{outside[0]!r} is no name of a file in the same directory")
    return weight_map


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the first byte after the header of a safetensors file, and the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


def _read(path: Path, start: int, tensor: torch.Tensor) -> None:
    """Fill a tensor with the bytes of a file that begin at `start`."""
    memory = bytes_of(tensor)
    with naming(path), path.open("rb", buffering=0) as file:
        file.seek(start)
        while len(memory):
            if not (count := file.readinto(memory)):
                raise OSError(errno.EIO, "the file ends within a tensor")
            memory = memory[count:]


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinite elements."""
    return bool(torch.stack(tensor.aminmax()).isfinite().all())  # without a mask of its size


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, which are its own memory where it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
