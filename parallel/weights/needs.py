"""The slices of the Hugging Face tensors that each rank of an engine needs; never imports torch.

They equal what vLLM 0.30's weight loaders copy on a tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallel.layout_rules import divisors, one_of
from parallel.settings import ModelSettings
from parallel.weights.boxes import Box, along
from parallel.weights.names import ModelWeights, Part, Units, Weight, tensor_prefix


def engine_violations(
    model: ModelSettings, tensor_parallel: int, expert_parallel: bool = False, data: int = 1
) -> list[tuple[str, str]]:
    """Return the reasons why an engine of this size cannot hold the model: (key, message)."""
    description = ModelWeights(model)
    weights = [w for key in description.buckets for w in description.weights[description.kind(key)]]
    found, ranks = [], tensor_parallel * data
    if expert_parallel or data > 1:  # whole experts need no width that ranks divide
        width = model.expert_hidden_size
        if not expert_parallel and width % ranks:
            message = (
                f"{data} x engine.tensor = {ranks} ranks do not divide model.expert_hidden_size ="
                f" {width}; use expert_parallel: true, or engine.data so that the ranks are"
            )
            found.append(("engine.data", f"{message} {_any_of(divisors(width))}"))
        weights = [weight for weight in weights if not weight.experts]
    split = dict.fromkeys(part.units for weight in weights for part in weight.parts)
    units = [each for each in split if each is not None]
    # The vocabulary and the attention heads are never repeated, so their divisors are candidates.
    common = math.gcd(*(_padded(each) for each in units if not each.repeated))
    fitting = [size for size in divisors(common) if all(_divides(size, each) for each in units)]
    for each in units:
        if not _divides(tensor_parallel, each):
            count = _padded(each)
            how = "neither divides nor is a multiple of" if each.repeated else "does not divide"
            padding = f", rounded up to {count}" if count != each.count else ""
            message = f"{tensor_parallel} {how} {each.name} = {each.count}{padding}"
            found.append(("engine.tensor", f"{message}; {one_of(fitting)}"))
    if expert_parallel and ranks > model.experts:
        few = f"{ranks} ranks cannot share model.experts = {model.experts}"
        found.append(("engine.expert_parallel", f"{few}; use fewer ranks, or false"))
    return found


def needed(
    model: ModelSettings, ranks: int, rank: int, expert_parallel: bool = False, data: int = 1
) -> list[tuple[str, Box]]:
    """Return the box of each Hugging Face tensor that an engine rank copies, by bucket.

    Tensors that the rank needs no part of are omitted. `needed_of` explains the arguments.
    """
    description = ModelWeights(model)
    found = []
    for key in description.buckets:
        weights, prefix = description.weights[description.kind(key)], tensor_prefix(key)
        boxes = needed_of(weights, ranks, rank, expert_parallel, data)
        found += [(prefix + name, box) for name, box in boxes]
    return found


def needed_of(
    weights: tuple[Weight, ...],
    ranks: int,
    rank: int,
    expert_parallel: bool = False,
    data: int = 1,
) -> Iterator[tuple[str, Box]]:
    """Yield the boxes that a rank needs of a bucket's weights, named within the bucket.

    Of the `ranks` of an engine with `data` members, each member's share all but the experts, which
    the ranks of all members share: slices of each, or with `expert_parallel` whole ones. Then
    members of several ranks give each its part of the tokens (vLLM's `use_sequence_parallel_moe`).
    """
    tensor = ranks // data
    by_tokens = expert_parallel and tensor > 1 and data > 1
    for weight in weights:
        split = (ranks, rank) if weight.experts else (tensor, rank % tensor)
        whole = expert_parallel and weight.experts > 0
        if whole or (by_tokens and weight.with_experts):
            split = (1, 0)
        if weight.once and split[1] > 0:
            continue
        boxes = [_box(part, weight.dimension, *split) for part in weight.parts]
        experts = range(max(1, weight.experts))
        for expert in _own(weight.experts, ranks, rank) if whole else experts:
            for part, box in zip(weight.parts, boxes, strict=True):
                if all(box[1]):
                    yield part.tensor.format(expert=expert), box


def _any_of(sizes: list[int]) -> str:
    return one_of(sizes).removeprefix("use ")


def _own(experts: int, ranks: int, rank: int) -> range:
    """Return the experts of a rank in vLLM's linear placement: the first ranks have one more."""
    each, more = divmod(experts, ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _box(part: Part, dimension: int | None, ranks: int, rank: int) -> Box:
    if dimension is None or part.units is None:
        return (0,) * len(part.shape), part.shape
    units = part.units
    places = min(ranks, units.count) if units.repeated else ranks
    each = _padded(units) // places
    first = min(rank * places // ranks * each, units.count)
    last = min(first + each, units.count)
    size = part.shape[dimension] // units.count
    return along(part.shape, dimension, part.first + first * size, (last - first) * size)


def _padded(units: Units) -> int:
    return -(-units.count // units.multiple) * units.multiple


def _divides(ranks: int, units: Units) -> bool:
    if units.repeated and ranks > units.count:
        return ranks % units.count == 0
    return _padded(units) % ranks == 0
