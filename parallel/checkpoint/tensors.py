"""The weights in a checkpoint, read one Hugging Face tensor at a time, without a model in memory.

Megatron-core's names in a checkpoint do not depend on the layout, but differ from the names of a
model's parameters: layers are stacked, and so are experts. Which part of which stored tensor a
Hugging Face tensor is, is computed once from the shards of a policy (`places`). Then any rank may
read any tensor of any checkpoint of that architecture, and no call is collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from parallel.checkpoint import state as checkpoint_state
from parallel.checkpoint.reader import CheckpointReader
from parallel.distributed import gather, layout_sizes
from parallel.files import CheckpointError, unreadable
from parallel.model.policy import Policy
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.boxes import Box, intersect, within
from parallel.weights.holdings import held
from parallel.weights.names import plain_name, tensors


class Place(NamedTuple):
    """A part of a Hugging Face tensor, and the box of the stored tensor `key` that it is."""

    box: Box
    key: str
    stored: Box


Places = Mapping[str, Sequence[Place]]


def places(policy: Policy) -> Places:
    """Return the places of every Hugging Face tensor in a checkpoint of the model. Collective."""
    places_by_tensor: dict[str, set[Place]] = {}
    for rank_places in gather(list(_own_places(policy))):
        for tensor, place in rank_places:
            places_by_tensor.setdefault(tensor, set()).add(place)
    return {name: sorted(tensor_places) for name, tensor_places in places_by_tensor.items()}


class StoredWeights:
    """The weights of one checkpoint, under their Hugging Face names."""

    def __init__(self, checkpoint: Path, model: ModelSettings, where: Places) -> None:
        """Read the metadata, and compare them with the model's tensors.

        Raises:
            CheckpointError: the checkpoint is of another model.
            CheckpointRefused: its metadata are not data alone.
        """
        self._directory = checkpoint
        self._shapes = tensors(model)
        self._places = where
        metadata = CheckpointReader(checkpoint).read_metadata()
        self._files = metadata.storage_data
        self._tensors = {
            key: tensor_metadata
            for key, tensor_metadata in metadata.state_dict_metadata.items()
            if isinstance(tensor_metadata, TensorStorageMetadata)
        }
        self._chunks = {
            key: _by_first_row(tensor_metadata) for key, tensor_metadata in self._tensors.items()
        }
        self._last: tuple[Any, torch.Tensor] | None = None
        for key, size in _sizes(where).items():
            stored_size = tuple(self._tensors[key].size) if key in self._tensors else None
            if stored_size != size:
                difference = f"{key} is {list(stored_size)}" if stored_size else f"{key} is missing"
                raise CheckpointError(
                    f"{checkpoint}: another model: {difference}, and {list(size)} in this run's "
                    "model; merge models of one architecture and vocabulary"
                )

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU, in the dtype that it is stored in.

        Raises:
            UnreadableCheckpoint: a file cannot be read.
        """
        stored = self._tensors[self._places[name][0].key]
        whole = torch.empty(self._shapes[name], dtype=stored.properties.dtype)
        for place in self._places[name]:
            shape = whole[within(place.box)].shape
            whole[within(place.box)] = self._box(place).view(shape)
        return whole

    def _box(self, place: Place) -> torch.Tensor:
        """Return a box of a stored tensor, from all the chunks that it crosses."""
        box = torch.empty(place.stored[1], dtype=self._tensors[place.key].properties.dtype)
        missing = box.numel()
        (start, *_), (count, *_) = place.stored
        rows = self._chunks[place.key].items()
        near = (chunks for row, (end, chunks) in rows if row < start + count and start < end)
        for chunk in chain.from_iterable(near):
            there = (tuple(chunk.offsets), tuple(chunk.sizes))
            if (common := intersect(place.stored, there)) is None:
                continue
            loaded = self._chunk(place.key, chunk.offsets).view(chunk.sizes)
            target, source = (_moved(common, outer_box[0]) for outer_box in (place.stored, there))
            box[within(target)] = loaded[within(source)]
            missing -= math.prod(common[1])
        assert missing == 0, f"{place.key} has holes"
        return box

    def _chunk(self, key: str, offsets: torch.Size) -> torch.Tensor:
        """Return a stored chunk; the last one is kept, since a fused tensor is read in parts."""
        index = MetadataIndex(key, offsets)
        if self._last is None or self._last[0] != index:
            stored = self._files[index]
            self._last = index, _load(self._directory / stored.relative_path, stored)
        return self._last[1]


def _by_first_row(
    tensor: TensorStorageMetadata,
) -> dict[int, tuple[int, list[ChunkStorageMetadata]]]:
    """Return the chunks by their first row, with the end of the longest.

    A model has tens of thousands of chunks of experts, and their first row is their layer.
    """
    chunks_by_row: dict[int, tuple[int, list[ChunkStorageMetadata]]] = {}
    for chunk in tensor.chunks:
        row, end = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
        last, row_chunks = chunks_by_row.get(row, (0, []))
        row_chunks.append(chunk)
        chunks_by_row[row] = max(last, end), row_chunks
    return chunks_by_row


def _sizes(where: Places) -> dict[str, tuple[int, ...]]:
    """Return the shape of every stored tensor: the places fill it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in (place for tensor_places in where.values() for place in tensor_places):
        ends = tuple(start + size for start, size in zip(*place.stored, strict=True))
        before = shapes.get(place.key, ends)
        shapes[place.key] = tuple(map(max, before, ends))
    return shapes


def _own_places(policy: Policy) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of which this rank's model has parts, and the place of each part."""
    latent = policy.bridge.config.multi_latent_attention
    shards = {
        (chunk, plain_name(name, latent)): shard
        for chunk, chunk_shards in checkpoint_state.weights(policy).items()
        for name, shard in chunk_shards.items()
        if isinstance(shard, ShardedTensor | ShardedTensorFactory)
    }
    layout = LayoutSettings(**layout_sizes(policy.bridge.config))
    for piece in held(policy.settings, layout, dist.get_rank()):
        inside = piece.parameter_offset, piece.box[1]
        for start, shard in _with_offsets(shards[piece.chunk, piece.parameter]):
            if common := intersect(inside, (start, tuple(shard.data.shape))):
                box = _moved(common, inside[0], piece.box[0])
                extra = shard.prepend_axis_num
                offsets, sizes = _moved(common, start, shard.global_offset[extra:])
                stacked = (*shard.global_offset[:extra], *offsets), ((1,) * extra + sizes)
                yield piece.tensor, Place(box, shard.key, stacked)


def _with_offsets(
    shard: ShardedTensor | ShardedTensorFactory,
) -> Iterator[tuple[tuple[int, ...], ShardedTensor]]:
    """Yield the stored shards of a parameter, each with its offset in the parameter.

    The weight of a gated layer is two, one below the other.
    """
    gated = isinstance(shard, ShardedTensorFactory)
    rows = 0
    for stored_shard in nested_values([shard.build()]) if gated else [shard]:
        yield (rows, *(0 for _ in stored_shard.data.shape[1:])), stored_shard
        rows += stored_shard.data.shape[0]


def _moved(box: Box, origin: Sequence[int], to: Sequence[int] | None = None) -> Box:
    """Return a box relative to `origin` instead of 0, then from there to `to`."""
    target = to or (0,) * len(origin)
    offsets = zip(box[0], origin, target, strict=True)
    return tuple(at - start + end for at, start, end in offsets), box[1]


def _load(file: Path, stored: Any) -> torch.Tensor:
    try:
        with file.open("rb") as opened:
            opened.seek(stored.offset)
            content = opened.read(stored.length)
    except OSError as error:
        raise unreadable(file, error) from error
    return torch.load(BytesIO(content), weights_only=True, map_location="cpu")
