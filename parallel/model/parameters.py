"""The parameters of this rank's model: their global names, their shards and their random start."""

from __future__ import annotations

import hashlib
import re

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from parallel.settings import ModelSettings

FIRST_DIMENSION_SPLIT = (
    r"word_embeddings|output_layer|linear_qkv\.(weight|bias)|linear_fc1\.weight"
    r"|linear_(q|q_up|kv_up)_proj\.weight|softmax_offset|in_proj\.weight|conv_weight|A_log|dt_bias"
)
SECOND_DIMENSION_SPLIT = r"(linear_proj|linear_fc2|out_proj)\.weight"


def split_dimension(name: str) -> int | None:
    """Return the dimension of a weight that tensor parallelism splits, None for replicas."""
    if re.search(SECOND_DIMENSION_SPLIT, name):
        return 1
    return 0 if re.search(FIRST_DIMENSION_SPLIT, name) else None


def tensor_split(name: str) -> tuple[int, int]:
    """Return the number of tensor-parallel ranks of a weight, and this rank's index."""
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return group.size(), group.rank()


def shard(name: str, whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return one rank's part of a whole weight; gate and up projection are split separately."""
    dimension = split_dimension(name)
    if dimension is None or size == 1:
        return whole
    halves = whole.chunk(2) if "linear_fc1" in name else [whole]
    return torch.cat([half.chunk(size, dimension)[rank] for half in halves])


def global_name(model: GPTModel, name: str) -> str:
    """Return a parameter's name with its layer and its expert numbered over all ranks."""
    experts = model.config.num_moe_experts // model.config.expert_model_parallel_size
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts
    first_layer = model.decoder.layers[0].layer_number - 1
    name = re.sub(r"layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) + first_layer}.", name)
    # Where experts are one module, as with TransformerEngine, their weights carry the number.
    return re.sub(
        r"(local_experts\.|experts\.linear_fc[12]\.(?:weight|bias))(\d+)",
        lambda m: f"{m[1]}{int(m[2]) + first_expert}",
        name,
    )


@torch.no_grad()
def initialize(model: GPTModel, settings: ModelSettings, seed: int) -> None:
    """Initialise the weights at random, identically under every layout.

    Every whole tensor has a separate generator, seeded by the run's seed and the tensor's global
    name; this rank keeps its shard. Linear layers have standard deviation hidden_size ** -0.5; the
    two that write to the residual stream are also scaled by (2 * layers) ** -0.5. Norms start at
    one, centred ones at zero; biases and attention sinks at zero, those of a delta net's steps at
    one; the rates at which delta nets forget are spread over [1, 16].
    """
    residual_scale = (2 * settings.layers) ** -0.5
    centred = model.config.layernorm_zero_centered_gamma
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith("A_log"):
            # TransformerEngine's linear layers name the norm before them layer_norm_weight.
            at_zero = r"\.bias\d*$|softmax_offset" + ("|layer_?norm" if centred else "")
            parameter.fill_(0.0 if re.search(at_zero, name) else 1.0)
            continue
        std = settings.hidden_size**-0.5
        if "word_embeddings" in name:
            std = settings.initialization.embedding_std
        elif "router" in name:
            std = settings.initialization.router_std
        elif "conv_weight" in name:
            std = parameter.shape[-1] ** -0.5
        elif split_dimension(name) == 1:
            std *= residual_scale
        digest = hashlib.sha256(f"{seed}/{global_name(model, name)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        size, rank = tensor_split(name)
        shape = list(parameter.shape)
        dimension = split_dimension(name)
        if dimension is not None:
            shape[dimension] *= size
        if name.endswith("A_log"):
            whole = (1 + 15 * torch.rand(shape, generator=generator)).log()
        else:
            whole = torch.randn(shape, generator=generator) * std
        parameter.copy_(shard(name, whole, size, rank))
