"""The slices of the Hugging Face tensors that each of the trainer's ranks holds, by arithmetic.

Ranks are numbered as megatron-core numbers them, tp-cp-ep-dp-pp: the pipeline's stages follow one
another, and within a stage tensor-parallel ranks are neighbours. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

from parallel.layout_rules import chunk_layers
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.boxes import Box, along
from parallel.weights.names import EMBEDDING, HEAD, FusedTensor, ModelWeights, Weight, tensor_prefix


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter: tensor[box], at parameter_offset in a rank's virtual chunk.

    The parameter is named as in the chunk's state_dict, without TransformerEngine
    (`names.plain_name`): layers and experts are numbered from 0 in every chunk.
    """

    tensor: str
    box: Box
    chunk: int
    parameter: str
    parameter_offset: tuple[int, ...]


class Shard(NamedTuple):
    """The weights that a set of a stage's ranks replicates.

    All unsplit weights, one tensor-parallel rank's part of the dense weights, or one
    expert-tensor-parallel rank's part of its experts.
    """

    kind: Literal["whole", "split", "experts"]
    tensor: int = 0
    expert: int = 0


class BucketPlace(NamedTuple):
    """A bucket's pipeline stage and virtual chunk, and the prefix of its parameters."""

    stage: int
    chunk: int
    prefix: str


class Layout:
    """The arithmetic of a layout."""

    def __init__(self, model: ModelSettings, layout: LayoutSettings) -> None:
        self.sizes = layout
        # Of every layer: its chunk, numbered over all stages, and its number in the chunk.
        self._layers = [
            (chunk, number)
            for chunk, layers in enumerate(chunk_layers(model, layout))
            for number, _ in enumerate(layers)
        ]
        self.experts = model.experts // layout.expert
        self.stage_ranks = layout.ranks // layout.pipeline

    def place(self, key: int) -> BucketPlace:
        """Return the place of a bucket."""
        pipeline = self.sizes.pipeline
        if key == EMBEDDING:
            return BucketPlace(0, 0, "")
        if key == HEAD:
            return BucketPlace(pipeline - 1, self.sizes.virtual_pipeline - 1, "")
        chunk, number = self._layers[key]
        return BucketPlace(chunk % pipeline, chunk // pipeline, f"decoder.layers.{number}.")

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self.stage_ranks

    def shards(self) -> list[Shard]:
        """Return all shards of a stage."""
        experts = product(range(self.sizes.expert), range(self.sizes.expert_tensor))
        return [
            Shard("whole"),
            *(Shard("split", tensor) for tensor in range(self.sizes.tensor)),
            *(Shard("experts", tensor, expert) for expert, tensor in experts),
        ]

    def shards_of(self, rank: int) -> tuple[Shard, Shard, Shard]:
        """Return the shards that a rank holds, in the order of `shards`."""
        # Within a stage experts have an order of their own: expert-tensor-parallel ranks are
        # neighbours, then expert-parallel ones, then replicas.
        sizes, place = self.sizes, rank % self.stage_ranks
        expert, tensor = divmod(place, sizes.expert_tensor)
        experts = Shard("experts", tensor, expert % sizes.expert)
        return Shard("whole"), Shard("split", place % sizes.tensor), experts

    def holders(self, shard: Shard, stage: int) -> range:
        """Return the ranks of a stage that hold a shard."""
        sizes, first_rank = self.sizes, stage * self.stage_ranks
        step, offset = {
            "whole": (1, 0),
            "split": (sizes.tensor, shard.tensor),
            "experts": (
                sizes.expert_tensor * sizes.expert,
                sizes.expert_tensor * shard.expert + shard.tensor,
            ),
        }[shard.kind]
        return range(first_rank + offset, first_rank + self.stage_ranks, step)

    def pieces(self, weights: Sequence[Weight], shard: Shard) -> Iterator[Piece]:
        """Yield a shard's pieces of a bucket's weights; names lack their prefix, chunks are 0."""
        ways = {"whole": 1, "split": self.sizes.tensor, "experts": self.sizes.expert_tensor}
        for weight in weights:
            kind = "whole" if weight.dimension is None else "split"
            if shard.kind != ("experts" if weight.experts else kind):
                continue
            cuts = list(_cuts(weight, ways[shard.kind], shard.tensor))
            for local in range(self.experts if weight.experts else 1):
                number = shard.expert * self.experts + local
                parameter = weight.parameter.format(expert=local)
                for fused, box, offset in cuts:
                    yield Piece(fused.tensor.format(expert=number), box, 0, parameter, offset)


def held(model: ModelSettings, layout: LayoutSettings, rank: int) -> list[Piece]:
    """Return all pieces of a rank, bucket by bucket; they cover its state_dict exactly once.

    Example: of 4 query and 2 key-value heads of 8, the second of two tensor-parallel ranks holds
    query heads 2 and 3 (rows 16-31), then key head 1 and value head 1 (rows 8-15).

        >>> model = ModelSettings(
        ...     vocabulary_size=64, hidden_size=32, layers=2, attention_heads=4, key_value_heads=2,
        ...     head_dim=8, experts=4, experts_per_token=2, expert_hidden_size=16,
        ... )
        >>> for piece in held(model, LayoutSettings(ranks=2, tensor=2), rank=1):
        ...     if piece.parameter == "decoder.layers.0.self_attention.linear_qkv.weight":
        ...         print(piece.tensor.split(".")[-2], piece.box, piece.parameter_offset)
        q_proj ((16, 0), (16, 32)) (0, 0)
        k_proj ((8, 0), (8, 32)) (16, 0)
        v_proj ((8, 0), (8, 32)) (24, 0)
    """
    description, arithmetic = ModelWeights(model), Layout(model, layout)
    pieces = []
    for key in description.buckets:
        stage, chunk, prefix = arithmetic.place(key)
        if stage != arithmetic.stage(rank):
            continue
        weights = description.weights[description.kind(key)]
        for shard in arithmetic.shards_of(rank):
            for piece in arithmetic.pieces(weights, shard):
                tensor, parameter = tensor_prefix(key) + piece.tensor, prefix + piece.parameter
                pieces.append(Piece(tensor, piece.box, chunk, parameter, piece.parameter_offset))
    return pieces


def owners(model: ModelSettings, layout: LayoutSettings) -> dict[str, list[tuple[Box, range]]]:
    """Return disjoint boxes that cover each Hugging Face tensor, with the ranks that hold each."""
    description, arithmetic = ModelWeights(model), Layout(model, layout)
    owned_boxes: dict[str, list[tuple[Box, range]]] = {}
    for key in description.buckets:
        prefix, stage = tensor_prefix(key), arithmetic.place(key).stage
        for shard in arithmetic.shards():
            holders = arithmetic.holders(shard, stage)
            for piece in arithmetic.pieces(description.weights[description.kind(key)], shard):
                owned_boxes.setdefault(prefix + piece.tensor, []).append((piece.box, holders))
    return owned_boxes


def _cuts(
    weight: Weight, ranks: int, rank: int
) -> Iterator[tuple[FusedTensor, Box, tuple[int, ...]]]:
    """Yield one of `ranks` parts of a weight as boxes of its tensors, with offsets in the part.

    A KV group's queries are followed by its key and value. Gate and up projection are split
    separately, as if every rank were a group.
    """
    if weight.dimension is None:
        [fused] = weight.tensors
        start = (0,) * len(fused.shape)
        yield fused, (start, fused.shape), start
        return
    groups = weight.groups or ranks
    groups_per_rank = groups // ranks
    position = 0
    for group in range(rank * groups_per_rank, (rank + 1) * groups_per_rank):
        for fused in weight.tensors:
            size = fused.shape[weight.dimension] // groups
            begin = fused.first_row + group * size
            box = along(fused.shape, weight.dimension, begin, size)
            yield fused, box, along(fused.shape, weight.dimension, position, size)[0]
            position += size
