"""A model's weights under their Hugging Face names: streamed out of the ranks, and filled in.

mbridge knows a family's names and how its tensors are fused, but for TransformerEngine's modules,
after which our local ones are named here. The ranks' parts are put together here too: mbridge
takes experts that are not spread over ranks for dense weights, though other ranks split them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from parallel.device import device
from parallel.distributed import broadcast, is_main
from parallel.hugging_face import (
    contradictions,
    expected_tensors,
    hugging_face_config,
    ignored_tensors,
)
from parallel.hugging_face_files import WeightFiles, WeightsError
from parallel.model import global_name, shard, split_dimension, tensor_split, unshard
from parallel.settings import ModelSettings


@torch.no_grad()
def stream_weights(bridge: Any, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face tensor of the model, whole, on every rank; a collective over all ranks.

    A layer's tensors follow one another. Of one tensor at a time a few copies are held.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    held = [item for chunk in chunks for item in _tensors(chunk)]
    described: list[Any] = [None] * pipeline.size()
    dist.all_gather_object(
        described, [(name, tensor.shape, tensor.dtype) for name, tensor in held], group=pipeline
    )
    for stage, its in enumerate(described):
        for place, (name, shape, dtype) in enumerate(its):
            if stage == pipeline.rank():
                part = held[place][1]
            else:
                part = torch.empty(shape, dtype=dtype, device=device())
            dist.broadcast(part, group=pipeline, group_src=stage)
            for one, spread in _experts_in_turn(bridge.config, name, part):
                names, tensors = bridge._weight_to_hf_format(one, _whole(one, spread))
                for theirs, tensor in zip(names, tensors, strict=True):
                    yield theirs, tensor.contiguous()


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

    Of one tensor at a time a few copies are held.
    """
    for chunk in chunks:
        for name, tensor in _tensors(chunk):
            parts = [files.read(theirs) for theirs in bridge._weight_name_mapping_mcore_to_hf(name)]
            whole = bridge._weight_to_mcore_format(name, parts)
            tensor.copy_(shard(name, whole, *tensor_split(name)))


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
    """A chunk's tensors in order, under the names mbridge knows them by, layers and experts
    numbered over all ranks."""
    latent = chunk.config.multi_latent_attention
    for name, tensor in chunk.state_dict().items():  # the bias of a router is no parameter
        if not name.endswith("_extra_state"):  # TransformerEngine's, of fp8
            yield _transformer_engine_name(global_name(chunk, name), latent), tensor


def _transformer_engine_name(name: str, latent: bool) -> str:
    """What TransformerEngine's modules call a tensor of ours; they have norms fused into what
    reads them, of which multi-latent attention has other ones."""
    name = re.sub(
        r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1", name
    )
    if latent:
        return re.sub(r"\.(q|kv)_layernorm\.weight", r".linear_\1_up_proj.layer_norm_weight", name)
    return name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")


def _experts_in_turn(
    config: Any, name: str, part: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The expert in this place on each expert-parallel rank in turn; any other weight as it is."""
    group = parallel_state.get_expert_model_parallel_group()
    if ".experts." not in name or group.size() == 1:
        yield name, part
        return
    prefix, number = name.split(".weight")
    each = config.num_moe_experts // group.size()
    for rank in range(group.size()):
        theirs = part if rank == group.rank() else torch.empty_like(part)
        dist.broadcast(theirs, group=group, group_src=rank)
        yield f"{prefix}.weight{rank * each + int(number) % each}", theirs


def _whole(name: str, part: torch.Tensor) -> torch.Tensor:
    """A weight of which every (expert-)tensor-parallel rank has a part."""
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    if split_dimension(name) is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return unshard(name, parts)
