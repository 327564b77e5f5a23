"""Weights that a rank reads again and again, such as a teacher's: planned once, then only read.

Loading a checkpoint verifies its checksums, and megatron-core matches the saved shards with the
layout's on all ranks. A `WeightPlan` keeps the result: which bytes of which file fill which part of
which parameter. Reading it again needs no collective planning and no memory but one host buffer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from parallel.checkpoint import state as checkpoint_state
from parallel.checkpoint.reader import CheckpointReader
from parallel.files import CheckpointError
from parallel.hugging_face import weights as hugging_face_weights
from parallel.hugging_face.files import DTYPES, WeightFiles
from parallel.model.policy import Policy
from parallel.weights.boxes import Box, intersect, within

BUFFER_BYTES = 32 << 20  # of a read; a single row may need more


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `start` is its first byte, its rows follow each other."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row along the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedRead:
    """The box of a stored tensor that fills `target`, a view of a parameter.

    Every `step`-th element of the box's last dimension does, from `offset` on: a stack of experts
    alternates between their projections.
    """

    source: StoredTensor
    box: Box
    target: Tensor
    offset: int = 0
    step: int = 1

    @property
    def span(self) -> tuple[int, int]:
        """The first byte of the rows that hold the box, and the number of their bytes."""
        first_row, rows = self.box[0][0], self.box[1][0]
        row = self.source.row_bytes
        return self.source.start + first_row * row, rows * row

    def fill(self, file: BinaryIO, buffer: Tensor) -> None:
        """Read the box, in runs of the rows that fit the buffer."""
        row, (start, _) = self.source.row_bytes, self.span
        most = max(1, len(buffer) // row)
        columns = within((self.box[0][1:], self.box[1][1:]))
        for begin in range(0, self.box[1][0], most):
            count = min(most, self.box[1][0] - begin)
            held = buffer[: count * row] if count * row <= len(buffer) else buffer.new_empty(row)
            _read(file, start + begin * row, held)
            rows = held.view(self.source.dtype).view(count, *self.source.shape[1:])
            elements = rows[(slice(None), *columns)]
            self.target[begin : begin + count].copy_(elements[..., self.offset :: self.step])


class WeightPlan:
    """The reads that fill this rank's part of a policy from one checkpoint."""

    def __init__(self, policy: Policy, checkpoint: Path) -> None:
        """Plan for a checkpoint that `load.weights` has accepted for this policy.

        Raises:
            CheckpointError: not every weight is planned.
        """
        policy.residency.hold()
        self._policy, self._checkpoint = policy, checkpoint
        reads = (
            _hugging_face_reads(policy, checkpoint)
            if (checkpoint / "config.json").is_file()
            else _megatron_reads(policy, checkpoint)
        )
        self._reads = sorted(map(_without_leading_ones, reads), key=_place)
        self._check_complete()
        self._changed = {
            path: _changed(path) for path in {read.source.file for read in self._reads}
        }

    def fill(self) -> None:
        """Read all weights into the policy.

        Raises:
            CheckpointError: a file cannot be read, or changed since the plan.
        """
        self._policy.residency.hold()
        self._run(self._reads)
        self._policy.weights_changed()

    def fill_head(self, head: Tensor) -> None:
        """Read the output head alone, into a tensor of its shape and strides; raise as `fill`."""
        policy_head = self._policy.chunks[-1].output_layer.weight
        self._run(
            replace(read, target=_same_view(read.target, policy_head, head))
            for read in self._reads
            if _shares_memory(read.target, policy_head)
        )

    def read_ahead(self) -> None:
        """Have the operating system read the files into its page cache, without waiting.

        The page cache is no process's memory: a rank holds no second model.
        """
        for path, reads in groupby(self._reads, key=lambda read: read.source.file):
            with suppress(OSError), path.open("rb") as file:  # `fill` reports what is wrong
                for start, end in _merged(read.span for read in reads):
                    number, size = file.fileno(), end - start
                    os.posix_fadvise(number, start, size, os.POSIX_FADV_WILLNEED)

    def _run(self, reads: Iterable[PlannedRead]) -> None:
        """Do reads that are sorted by file; raise CheckpointError where one fails."""
        try:
            self._read(reads)
        except OSError as error:
            raise CheckpointError(f"cannot read {self._checkpoint}: {error}") from error

    def _read(self, reads: Iterable[PlannedRead]) -> None:
        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        for path, file_reads in groupby(reads, key=lambda read: read.source.file):
            with torch.no_grad(), path.open("rb", buffering=0) as file:
                if _changed(path) != self._changed[path]:
                    raise CheckpointError(
                        f"{path} changed while a stage reads it; resume the run, which verifies it"
                        " again"
                    )
                for read in file_reads:
                    read.fill(file, buffer)

    def _check_complete(self) -> None:
        """Raise CheckpointError unless the reads fill every element once."""
        expected = sum(tensor.numel() for tensor in self._policy.named_weights().values())
        planned = sum(read.target.numel() for read in self._reads)
        if planned != expected:
            raise CheckpointError(
                f"{self._checkpoint}: {planned} of {expected} elements of this rank's weights "
                "found; rerun its stage with --from"
            )


def _megatron_reads(policy: Policy, checkpoint: Path) -> Iterator[PlannedRead]:
    """Yield the reads of a checkpoint of megatron-core's format, saved under any layout."""
    metadata = CheckpointReader(checkpoint).read_metadata()
    saved = _SavedShards(checkpoint, metadata)
    memory = {tensor.untyped_storage()._cdata for tensor in policy.named_weights().values()}
    for shard in _shards(checkpoint_state.weights(policy)):
        if shard.data.untyped_storage()._cdata not in memory:
            # megatron-core rearranges the weight for its checkpoint.
            raise NotImplementedError(f"{shard.key} is not a plain part of its parameter")
        extra = (1,) * shard.prepend_axis_num
        shard_box: Box = (tuple(shard.global_offset), (*extra, *shard.local_shape))
        target = shard.data.view(shard_box[1]) if extra else shard.data
        for stored, box in saved.within(shard.key, shard_box):
            common = intersect(shard_box, box)
            assert common is not None
            yield PlannedRead(
                stored, _relative(common, box), target[within(_relative(common, shard_box))]
            )


def _hugging_face_reads(policy: Policy, directory: Path) -> Iterator[PlannedRead]:
    """Yield the reads of a Hugging Face checkpoint."""
    files = WeightFiles(directory)
    places = hugging_face_weights.stacked_parts(policy.settings)
    for tensor_name, tensor_box, target in hugging_face_weights.own_parts(
        policy.bridge, policy.chunks
    ):
        name, box, number, step = tensor_name, tensor_box, 0, 1
        if tensor_name in places:
            stack, expert, number = places[tensor_name]
            name = stack.tensor
            box = hugging_face_weights.of_member(stack.covering(tensor_box), expert)
            target = (target.t() if target.ndim == 2 else target)[None]
            step = len(stack.part_names)
        stored = files.stored[name]
        source = StoredTensor(stored.file, stored.start, DTYPES[stored.dtype], stored.shape)
        yield PlannedRead(source, box, target, number, step)


class _SavedShards:
    """The shards of tensors in a checkpoint of torch's distributed format."""

    def __init__(self, checkpoint: Path, metadata: Any) -> None:
        self._checkpoint = checkpoint
        self._tensors = metadata.state_dict_metadata
        self._places: dict[str, dict[Box, Any]] = {}
        for index, place in metadata.storage_data.items():
            kind = self._tensors[index.fqn]
            if index.offset is not None:  # else it is an object
                sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in kind.chunks}
                box = (tuple(index.offset), sizes[tuple(index.offset)])
                self._places.setdefault(index.fqn, {})[box] = place

    def within(self, name: str, target_box: Box) -> Iterator[tuple[StoredTensor, Box]]:
        """Yield the saved shards of a tensor that have a part of a box of it."""
        saved = self._places.get(name, {})
        for box in [target_box] if target_box in saved else saved:
            if intersect(target_box, box) is not None:
                yield self._stored(saved[box], box), box

    def _stored(self, place: Any, box: Box) -> StoredTensor:
        """Return where a shard's bytes begin in its file, which torch.save has written."""
        path = self._checkpoint / place.relative_path
        with path.open("rb") as file, FakeTensorMode():  # reads the shard's header alone
            view: Any = _create_file_view(file, place.offset, place.length)
            tensor = torch.load(view, weights_only=True)
        if not tensor.is_contiguous() or tuple(tensor.shape) != box[1]:
            raise NotImplementedError(f"{path}: a shard of shape {box[1]} is not contiguous")
        start = tensor.untyped_storage()._checkpoint_offset
        start += tensor.storage_offset() * tensor.dtype.itemsize
        return StoredTensor(path, place.offset + start, tensor.dtype, box[1])


def _shards(state: Any) -> Iterator[ShardedTensor]:
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):  # such as a gated layer's, of two tensors
            yield from _shards([value.build()])
        elif isinstance(value, ShardedTensor):
            yield value


def _relative(box: Box, to: Box) -> Box:
    """Return a box's place in a box around it."""
    return tuple(at - start for at, start in zip(box[0], to[0], strict=True)), box[1]


def _without_leading_ones(read: PlannedRead) -> PlannedRead:
    """Return the read without leading dimensions of one element, so that its rows are small.

    A tensor without dimensions gets one.
    """
    shape, (offsets, sizes), target = read.source.shape, read.box, read.target
    if not shape:
        shape, offsets, sizes, target = (1,), (0,), (1,), target.view(1)
    least = 1 if read.step == 1 else 2  # the last dimension, with steps, is not that of the rows
    while len(shape) > least and shape[0] == 1:
        shape, offsets, sizes, target = shape[1:], offsets[1:], sizes[1:], target[0]
    source = replace(read.source, shape=shape)
    return PlannedRead(source, (offsets, sizes), target, read.offset, read.step)


def _merged(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first and last byte of sorted spans, those that nearly touch as one."""
    start = end = -1
    for begin, size in spans:
        if start < 0 or begin > end + BUFFER_BYTES:
            if start >= 0:
                yield start, end
            start, end = begin, begin + size
        end = max(end, begin + size)
    if start >= 0:
        yield start, end


def _place(read: PlannedRead) -> tuple[str, int]:
    return str(read.source.file), read.span[0]


def _changed(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _same_view(view: Tensor, of: Tensor, other: Tensor) -> Tensor:
    """Return the part of `other` that `view` is of `of`; both have one shape and strides."""
    offset = view.storage_offset() - of.storage_offset() + other.storage_offset()
    return other.as_strided(view.size(), view.stride(), offset)


def _read(file: BinaryIO, start: int, into: Tensor) -> None:
    """Fill bytes from a place of a file."""
    memory = into.numpy().data
    done = 0
    while done < len(memory):
        count = os.preadv(file.fileno(), [memory[done:]], start + done)
        if count == 0:
            raise CheckpointError(f"{file.name} ends before byte {start + len(memory)}")
        done += count
