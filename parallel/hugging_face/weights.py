"""A model's weights under their Hugging Face names: streamed out of the ranks, and filled in.

What a tensor is called and who holds which part of it is the arithmetic of `parallel.weights`; here
the parts are moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from parallel.boxes import Box, within
from parallel.device import device
from parallel.distributed import broadcast, is_main, layout_sizes
from parallel.hugging_face.config import (
    contradictions,
    expected_tensors,
    hugging_face_config,
    ignored_tensors,
    settings_of,
)
from parallel.hugging_face.files import WeightFiles, WeightsError
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.holdings import Owners, held
from parallel.weights.names import is_precise, plain_name, tensors


@torch.no_grad()
def stream_weights(bridge: Any, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face tensor of the model, whole, on every rank; a collective over all ranks.

    They come in the model's order, a layer's one after another. One tensor is held, and a rank's
    part of it.
    """
    settings = settings_of(bridge.hf_config)
    owners = Owners(settings, LayoutSettings(**layout_sizes()))
    ours: dict[str, dict[Box, torch.Tensor]] = {}
    for name, box, part in _parts(bridge, chunks):
        ours.setdefault(name, {})[box] = part
    for name, shape in tensors(settings).items():
        dtype = torch.float32 if is_precise(name) else bridge.config.params_dtype
        whole = torch.empty(shape, dtype=dtype, device=device())
        sources: dict[int, list[torch.Tensor]] = {}
        for box, ranks in owners.of(name):
            target = whole[within(box)]
            if dist.get_rank() == ranks[0]:
                target.copy_(ours[name][box])
            sources.setdefault(ranks[0], []).append(target)
        for source, targets in sources.items():
            _broadcast(targets, source)
        yield name, whole


def load_weights(
    settings: ModelSettings, bridge: Any, chunks: Sequence[GPTModel], directory: Path
) -> None:
    """`fill_weights` from a folder that a person has named; a collective over all ranks.

    Raises:
        WeightsError: the folder holds no such model; nothing is changed.
    """
    faults = broadcast(_faults(settings, directory) if is_main() else None)
    if faults:
        raise WeightsError(f"model.initial_weights: cannot start from {directory}", faults)
    fill_weights(bridge, chunks, WeightFiles(directory))


@torch.no_grad()
def fill_weights(bridge: Any, chunks: Sequence[GPTModel], files: WeightFiles) -> None:
    """Fill this rank's shard from a checkpoint, which must hold all that it needs.

    Only that is read, one slice of a tensor at a time.
    """
    for name, box, part in _parts(bridge, chunks):
        part.copy_(files.read(name, box))


@torch.no_grad()
def forget_weights(chunks: Sequence[GPTModel]) -> None:
    """Make every weight NaN, so that one which is not filled again cannot go unseen."""
    for chunk in chunks:
        for _, tensor in _tensors(chunk):
            tensor.fill_(torch.nan)


def _faults(settings: ModelSettings, directory: Path) -> list[str]:
    """Why a folder cannot fill a model of these settings."""
    if not directory.is_dir():
        return ["no such folder"]
    files = WeightFiles(directory)
    try:
        given = dict(json.loads((directory / "config.json").read_text()))
        faults = contradictions(settings, given)
    except (OSError, ValueError, TypeError) as error:
        faults = [f"config.json: {error}"]
    if not faults and not files.faults:  # of which the tensors' own faults would only follow
        config = hugging_face_config(settings)
        expected = expected_tensors(config)
        faults = files.missing(expected) + files.unexpected(expected, ignored_tensors(config))
    return files.faults + faults


def _tensors(chunk: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """A chunk's tensors in order, named as without TransformerEngine."""
    latent = chunk.config.multi_latent_attention
    for name, tensor in chunk.state_dict().items():  # the bias of a router is no parameter
        if not name.endswith("_extra_state"):  # TransformerEngine's, of fp8
            yield plain_name(name, latent), tensor


def _parts(bridge: Any, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """All that this rank holds: Hugging Face tensors, boxes of them, and where they are here."""
    named = [dict(_tensors(chunk)) for chunk in chunks]
    layout = LayoutSettings(**layout_sizes())
    for piece in held(settings_of(bridge.hf_config), layout, dist.get_rank()):
        here = piece.parameter_offset, piece.box[1]
        yield piece.tensor, piece.box, named[piece.chunk][piece.parameter][within(here)]


def _broadcast(targets: list[torch.Tensor], source: int) -> None:
    """Parts of a tensor, that rank `source` has, to all ranks, in one message."""
    [first, *others] = targets
    if not others and first.is_contiguous():
        dist.broadcast(first, source)
        return
    message = torch.cat([target.flatten() for target in targets])
    dist.broadcast(message, source)
    for target, part in zip(
        targets, message.split([target.numel() for target in targets]), strict=True
    ):
        target.copy_(part.view_as(target))
