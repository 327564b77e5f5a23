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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from parallel.boxes import Box, intersect, within
from parallel.checkpoint import state as checkpoint_state
from parallel.checkpoint.reader import CheckpointReader
from parallel.distributed import gather, layout_sizes
from parallel.files import CheckpointError, unreadable
from parallel.model.policy import Policy
from parallel.settings import LayoutSettings, ModelSettings
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
    found: dict[str, set[Place]] = {}
    for own in gather(list(_own_places(policy))):
        for tensor, place in own:
            found.setdefault(tensor, set()).add(place)
    return {name: sorted(each) for name, each in found.items()}


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
        self._metadata = CheckpointReader(checkpoint).read_metadata()
        self._last: tuple[Any, torch.Tensor] | None = None
        for name in self._shapes:
            for place in where[name]:
                self._check(name, place)

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU, in the dtype that it is stored in.

        Raises:
            UnreadableCheckpoint: a file cannot be read.
        """
        stored = self._metadata.state_dict_metadata[self._places[name][0].key]
        whole = torch.empty(self._shapes[name], dtype=stored.properties.dtype)
        for place in self._places[name]:
            shape = whole[within(place.box)].shape
            whole[within(place.box)] = self._box(place).view(shape)
        return whole

    def _check(self, name: str, place: Place) -> None:
        described = self._metadata.state_dict_metadata.get(place.key)
        size = tuple(getattr(described, "size", ()))
        ends = [start + count for start, count in zip(*place.stored, strict=True)]
        if len(size) != len(ends) or any(end > most for end, most in zip(ends, size, strict=True)):
            held_ = f"{place.key} of the shape {list(size)}" if size else f"no {place.key}"
            raise CheckpointError(
                f"{self._directory}: another model: it has {held_}, where {name} of this run's"
                " model is read from; merge models of one architecture and vocabulary"
            )

    def _box(self, place: Place) -> torch.Tensor:
        """Return a box of a stored tensor, from all the chunks that it crosses."""
        described = self._metadata.state_dict_metadata[place.key]
        box = torch.empty(place.stored[1], dtype=described.properties.dtype)
        missing = box.numel()
        for chunk in described.chunks:
            there = (tuple(chunk.offsets), tuple(chunk.sizes))
            if (common := intersect(place.stored, there)) is None:
                continue
            loaded = self._chunk(place.key, chunk.offsets).view(chunk.sizes)
            target, source = (_moved(common, each[0]) for each in (place.stored, there))
            box[within(target)] = loaded[within(source)]
            missing -= math.prod(common[1])
        assert missing == 0, f"{place.key} has holes"
        return box

    def _chunk(self, key: str, offsets: torch.Size) -> torch.Tensor:
        """Return a stored chunk; the last one is kept, since a fused tensor is read in parts."""
        index = MetadataIndex(key, offsets)
        if self._last is None or self._last[0] != index:
            stored = self._metadata.storage_data[index]
            self._last = index, _load(self._directory / stored.relative_path, stored)
        return self._last[1]


def _own_places(policy: Policy) -> Iterator[tuple[str, Place]]:
    """Yield the tensors of which this rank's model has parts, and the place of each part."""
    latent = policy.bridge.config.multi_latent_attention
    shards = {
        (chunk, plain_name(name, latent)): shard
        for chunk, own in checkpoint_state.weights(policy).items()
        for name, shard in own.items()
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
    for each in nested_values([shard.build()]) if gated else [shard]:
        yield (rows, *(0 for _ in each.data.shape[1:])), each
        rows += each.data.shape[0]


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
