"""Export and import of a model's weights under their Hugging Face names, across ranks.

`parallel.weights` computes the names and which rank holds which part; here the parts are moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from parallel.distributed import broadcast, gather, is_main, layout_sizes
from parallel.families import is_readable
from parallel.files import read_text
from parallel.hugging_face.config import (
    contradictions,
    expected_tensors,
    hugging_face_config,
    ignored_tensors,
    settings_of,
)
from parallel.hugging_face.files import WeightFiles, WeightsError, is_finite
from parallel.hugging_face.stored import mtp_errors, mtp_tensors
from parallel.machine.device import device
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.boxes import Box, within
from parallel.weights.holdings import held, owners
from parallel.weights.names import is_precise, plain_name, stored_tensors, tensors
from parallel.weights.stacks import Stack


@torch.no_grad()
def stream_weights(bridge: Any, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor of the model, whole, on every rank, in the model's order.

    Only one whole tensor is in memory at a time. Collective over all ranks.
    """
    settings = settings_of(bridge.hf_config)
    holders = owners(settings, LayoutSettings(**layout_sizes(bridge.config)))
    ours: dict[str, dict[Box, torch.Tensor]] = {}
    for name, box, shard in own_parts(bridge, chunks):
        ours.setdefault(name, {})[box] = shard
    for name, shape, stack in stored_tensors(settings):
        dtype = torch.float32 if is_precise(name) else bridge.config.params_dtype
        whole = torch.empty(shape, dtype=dtype, device=device())
        sources: dict[int, list[torch.Tensor]] = {}
        for tensor_name, view in unstacked(name, whole, stack):
            for box, ranks in holders[tensor_name]:
                target = view[within(box)]
                if dist.get_rank() == ranks[0]:
                    target.copy_(ours[tensor_name][box])
                sources.setdefault(ranks[0], []).append(target)
        for source, targets in sources.items():
            [first, *others] = targets
            if not others and first.is_contiguous():
                dist.broadcast(first, source)
                continue
            message = torch.cat([target.flatten() for target in targets])
            dist.broadcast(message, source)
            sections = message.split([target.numel() for target in targets])
            for target, section in zip(targets, sections, strict=True):
                target.copy_(section.view_as(target))
        yield name, whole


def load_weights(
    settings: ModelSettings, bridge: Any, chunks: Sequence[GPTModel], directory: Path
) -> None:
    """Check `model.initial_weights` and fill the weights from it. Collective over all ranks.

    Raises:
        WeightsError: the directory holds no such model, and no weight is changed; or a tensor in it
            has NaN or infinite elements, and all weights are changed.
    """
    files = checked_files(settings, directory)
    broken = fill_parts(own_parts(bridge, chunks), files)
    if directory == settings.initial_weights:  # from which an export copies them
        broken |= files.broken_mtp(settings.layers, dist.get_rank(), dist.get_world_size())
    errors = {f"{files.place(name)} has NaN or infinite elements" for name in broken}
    # All ranks raise the errors of each: a rank left alone would wait for ever.
    if all_errors := set().union(*gather(errors)):
        raise WeightsError(f"{directory}: no model can start from it", sorted(all_errors))


class ModelFiles:
    """A checkpoint's tensors by the names of `weights.names`, also where they are stacked."""

    def __init__(self, settings: ModelSettings, files: WeightFiles) -> None:
        self._places, self._files = stacked_parts(settings), files
        # Gate and up projection alternate in an expert's slice, and are asked for in turn.
        self._slice = lru_cache(1)(files.read)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a tensor or a box of it, on the CPU."""
        if name not in self._places:
            return self._files.read(name, box)
        stack, expert, number = self._places[name]
        box = ((0,) * len(stack.shape), stack.shape) if box is None else box
        member = self._slice(stack.tensor, of_member(stack.covering(box), expert))
        return stack.part(member[0], number)

    def place(self, name: str) -> str:
        """Return the file that a tensor is in, and its name there."""
        if name in self._places:
            name = self._places[name][0].tensor
        return f"{self._files.file_of(name).name}: {name}"

    def broken_mtp(self, layers: int, rank: int, ranks: int) -> set[str]:
        """Return the multi-token prediction tensors of a rank's share that are not finite."""
        return {
            name
            for name in [*mtp_tensors(self._files.stored, layers)][rank::ranks]
            if (tensor := self._files.read(name)).numel() and not is_finite(tensor)
        }


def checked_files(settings: ModelSettings, directory: Path) -> ModelFiles:
    """Return the files of a Hugging Face checkpoint of the model. Collective over all ranks.

    Raises:
        WeightsError: the directory holds no such model.
    """
    errors = broadcast(start_errors(settings, directory) if is_main() else None)
    if errors:
        raise WeightsError(f"{directory}: no checkpoint of this model", errors)
    return ModelFiles(settings, WeightFiles(directory))


def fill_weights(bridge: Any, chunks: Sequence[GPTModel], files: WeightFiles) -> None:
    """Fill this rank's shards from a checkpoint that has all of them.

    Only the shards are read, one slice of a tensor at a time.
    """
    fill_parts(own_parts(bridge, chunks), ModelFiles(settings_of(bridge.hf_config), files))


@torch.no_grad()
def fill_parts(shards: Iterable[tuple[str, Box, torch.Tensor]], files: ModelFiles) -> set[str]:
    """Fill parts, as `own_parts` yields them; return the names of those that are not finite.

    Only the boxes of the parts are read and checked, in the dtype of the model.
    """
    broken = set()
    for name, box, shard in shards:
        shard.copy_(files.read(name, box))
        if not is_finite(shard):
            broken.add(name)
    return broken


@torch.no_grad()
def spread_weights(
    bridge: Any, chunks: Sequence[GPTModel], compute: Callable[[str], torch.Tensor]
) -> None:
    """Fill every rank's shards with whole tensors that the ranks compute. Collective.

    `compute` takes a Hugging Face name. Every tensor is computed on one rank, in the model's order
    dealt to the ranks in turn, and sent to all: which rank computes it does not change it. A rank
    holds two whole tensors at most, beside its shards.
    """
    settings = settings_of(bridge.hf_config)
    ours: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, box, shard in own_parts(bridge, chunks):
        ours.setdefault(name, []).append((box, shard))
    shapes, ranks, rank = list(tensors(settings).items()), dist.get_world_size(), dist.get_rank()
    for start in range(0, len(shapes), ranks):
        dealt = shapes[start : start + ranks]
        computed = compute(dealt[rank][0]) if rank < len(dealt) else None
        for source, (name, shape) in enumerate(dealt):
            dtype = torch.float32 if is_precise(name) else bridge.config.params_dtype
            whole = torch.empty(shape, dtype=dtype, device=device())
            if source == rank and computed is not None:
                whole.copy_(computed)
            dist.broadcast(whole, source)
            for box, shard in ours.get(name, ()):
                shard.copy_(whole[within(box)])


@torch.no_grad()
def forget_weights(chunks: Sequence[GPTModel]) -> None:
    """Set every weight to NaN, so that a weight that is not filled afterwards is noticed."""
    for chunk in chunks:
        for _, tensor in _tensors(chunk):
            tensor.fill_(torch.nan)


def start_errors(settings: ModelSettings, directory: Path) -> list[str]:
    """Return why a directory cannot fill a model of these settings."""
    if not directory.is_dir():
        return ["no such directory"]
    files = WeightFiles(directory)
    try:
        config_json = dict(json.loads(read_text(directory / "config.json")))
        errors = contradictions(settings, config_json)
        if (stated := config_json.get("quantization_config")) is not None and not is_readable(
            stated
        ):
            errors.append("config.json: its weights are quantized; name the checkpoint before that")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        errors = [f"config.json: {error}"]
    if not errors and not files.errors:  # else errors of tensors would only be consequences
        config = hugging_face_config(settings)
        errors = files.check(expected_tensors(config), ignored_tensors(config))
        if directory == settings.initial_weights:  # from which an export copies them
            errors += mtp_errors(files.stored, settings.layers, files.block_size)
    return files.errors + errors


def _tensors(chunk: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a chunk's tensors in order, named as without TransformerEngine."""
    latent = chunk.config.multi_latent_attention
    for name, tensor in chunk.state_dict().items():  # a router's bias is a buffer
        if not name.endswith("_extra_state"):  # TransformerEngine's, of fp8
            yield plain_name(name, latent), tensor


def stacked_parts(settings: ModelSettings) -> dict[str, tuple[Stack, int, int]]:
    """Return the stack, the expert and the number of every tensor that a checkpoint stacks."""
    return {
        name: (stack, expert, number)
        for _, _, stack in stored_tensors(settings)
        if stack is not None
        for expert in range(stack.experts)
        for number, name in enumerate(stack.names(expert))
    }


def of_member(box: Box, expert: int) -> Box:
    """Return the box of a stacked tensor that is a box of an expert's slice."""
    return (expert, *box[0]), (1, *box[1])


def unstacked(
    name: str, whole: torch.Tensor, stack: Stack | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor of a checkpoint, or what it stacks: names and views."""
    if stack is None:
        yield name, whole
        return
    for expert in range(stack.experts):
        for number, tensor_name in enumerate(stack.names(expert)):
            yield tensor_name, stack.part(whole[expert], number)


def own_parts(bridge: Any, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Yield this rank's parts: the Hugging Face tensor, the box of it, and the local view."""
    chunk_tensors = [dict(_tensors(chunk)) for chunk in chunks]
    layout = LayoutSettings(**layout_sizes(bridge.config))
    for piece in held(settings_of(bridge.hf_config), layout, dist.get_rank()):
        here = piece.parameter_offset, piece.box[1]
        yield piece.tensor, piece.box, chunk_tensors[piece.chunk][piece.parameter][within(here)]
