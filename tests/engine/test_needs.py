"""The slices that an engine rank needs by arithmetic equal those that vLLM's loaders copy."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from parallel.families import FAMILIES
from parallel.hugging_face.config import hugging_face_config
from parallel.settings import ModelSettings
from parallel.weights.boxes import Box
from parallel.weights.names import loaded_tensors
from parallel.weights.needs import needed
from parallel.weights.stacks import Member
from pipeline.launch.placement import ForkServers
from tests.engine.engine_process import call

DENSE_AND_SHARED = {"first_k_dense_replace": 1, "intermediate_size": 64, "n_shared_experts": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 24}
DELTA_NET = {
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "glm4_moe": ("glm4_moe", {**DENSE_AND_SHARED, "attention_bias": True, "use_qk_norm": True}),
    "deepseek_v3": ("deepseek_v3", {**DENSE_AND_SHARED, **LATENT}),
    "deepseek_v3 uncompressed": (
        "deepseek_v3",
        {**DENSE_AND_SHARED, **LATENT, "q_lora_rank": None},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**DENSE_AND_SHARED, **LATENT}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", DELTA_NET),
}
# (ranks, rank, members); the last of one member has no rows of the vocabulary.
RANKS = [(2, 1, 1), (8, 3, 1), (8, 7, 1), (2, 1, 2), (8, 5, 2), (8, 6, 4)]
Shape = tuple[int, ...]
Boxes = list[tuple[str, Box]]
# By model and expert parallelism, of each of RANKS: all boxes, and those of experts given stacked.
Copied = dict[tuple[str, bool], list[tuple[Boxes, Boxes]]]


class Copies(TorchFunctionMode):
    """A record of the boxes of tensors that are copied."""

    def __init__(self, weights: dict[str, torch.Tensor], members: dict[str, Member | None]) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in weights.items()}
        self.members = members
        self.found: Boxes = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]  # a transposed tensor stays a view
        if func in (torch.Tensor.copy_, torch.Tensor.__setitem__):
            part = args[-1]
            whole = part if part._base is None else part._base
            first = last = part.storage_offset()
            last += sum((n - 1) * by for n, by in zip(part.shape, part.stride(), strict=True))
            starts, ends = [], []
            for stride in whole.stride():
                starts.append(first // stride)
                ends.append(last // stride)
                first, last = first % stride, last % stride
            sizes = tuple(end - start + 1 for start, end in zip(starts, ends, strict=True))
            name, box = self.names.get(id(whole)), (tuple(starts), sizes)
            if name is not None and part.numel():  # else zeros, of biases that another rank adds
                member = self.members[name]
                self.found += [(name, box)] if member is None else member.boxes(box)
            if part.is_meta and not args[0].is_meta:  # some parameters name their device
                return args[0]
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def copied(fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory) -> Copied:
    """The boxes that vLLM copies on each of RANKS, by model; computed in a separate process."""
    directory = tmp_path_factory.mktemp("models")
    found: Copied = call(fork_servers, copies, directory, str(directory))
    return found


@pytest.mark.parametrize("whole", [False, True], ids=["expert_tensor", "expert_parallel"])
@pytest.mark.parametrize("name", MODELS)
def test_needs_are_what_the_loaders_of_vllm_copy(name: str, whole: bool, copied: Copied) -> None:
    for place, (found, _) in zip(RANKS, copied[name, whole], strict=True):
        size, rank, members = place
        assert sorted(found) == sorted(needed(model(name), size, rank, whole, members)), place


@pytest.mark.parametrize("whole", [False, True], ids=["expert_tensor", "expert_parallel"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])
def test_stacked_experts_are_copied_as_single_ones(name: str, whole: bool, copied: Copied) -> None:
    for place, (found, stacked) in zip(RANKS, copied[name, whole], strict=True):
        alone = [(tensor, box) for tensor, box in found if ".experts." in tensor]
        assert alone and sorted(stacked) == sorted(alone), place


def model(name: str) -> ModelSettings:
    """Return a model with fewer KV heads than 8 ranks, the last of which has no vocabulary rows."""
    family, further = MODELS[name]
    return ModelSettings(
        family=family,
        vocabulary_size=80,
        hidden_size=64,
        layers=2,
        attention_heads=8,
        key_value_heads=8 if FAMILIES[family].latent_attention or family == "gpt_oss" else 4,
        head_dim=32,
        experts=20,  # which 8 ranks share unevenly
        experts_per_token=4,
        # vLLM pads a rank's part of gpt-oss' experts to no multiple of 32, as its kernel needs.
        expert_hidden_size=64 if family != "gpt_oss" else 256,
        precision="bf16",
        architecture=further,
        norm_epsilon=1e-5 if family == "gpt_oss" else 1e-6,
    )


def copies(directory: str) -> Copied:
    """Return the boxes that vLLM copies while this process acts as each of RANKS."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import vllm.distributed.parallel_state as groups
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from parallel.cpu import vllm_vision

    vllm_vision.provide()
    found: Copied = {}
    for name, whole in product(MODELS, (False, True)):
        settings, path = model(name), str(Path(directory) / name.replace(" ", "_"))
        config = hugging_face_config(settings)
        config.topk_method = "noaux_tc"  # DeepSeek-V3's, which transformers 5 omits
        config.save_pretrained(path)
        found[name, whole] = []
        for size, rank, members in RANKS:
            engine = EngineArgs(model=path, skip_tokenizer_init=True).create_engine_config()
            with set_current_vllm_config(engine):
                if not groups.model_parallel_is_initialized():
                    groups.init_distributed_environment(1, 0, "env://", 0, "gloo")
                    groups.initialize_model_parallel(1)
                tensor, data = groups.get_tp_group(), groups.get_dp_group()
                engine.parallel_config.tensor_parallel_size = size // members
                engine.parallel_config.data_parallel_size = members
                engine.parallel_config.enable_expert_parallel = whole
                tensor.world_size, data.world_size = size // members, members
                data.rank_in_group, tensor.rank_in_group = divmod(rank, size // members)
                # vLLM looks into its map of the experts while it builds, which meta has not.
                with torch.device("cpu" if whole else "meta"):
                    built = initialize_model(engine)
                    taken = list(loaded_tensors(settings))
                    weights = {each: torch.empty(shape) for each, shape, _ in taken}
                members = {each: member for each, _, member in taken}
                with torch.no_grad(), Copies(weights, members) as recorder:
                    built.load_weights(iter(weights.items()))
                stacked = [] if any(members.values()) else boxes_of_stacks(built, taken)
                for group in (tensor, data):
                    group.world_size, group.rank_in_group = 1, 0
            found[name, whole].append((recorder.found, stacked))
    return found


def boxes_of_stacks(built: torch.nn.Module, taken: list[tuple[str, Shape, Any]]) -> Boxes:
    """Return the boxes that vLLM copies of a model's stacked experts, in three calls per layer."""
    from parallel.engine.expert_stacks import expert_stacks
    from parallel.engine.loaders import Unread

    found: Boxes = []
    shapes = {name: shape for name, shape, _ in taken}

    def note(_: torch.Tensor, source: Unread) -> None:
        found.append((source.tensor_name, source.box()))

    stacks = list(expert_stacks(built, shapes))
    routed = {name.split(".experts.")[0] for name in shapes if ".experts." in name}
    assert len(stacks) == 3 * len(routed)
    for stack in stacks:
        stack.load(shapes[stack.names[0]], torch.bfloat16, note)
    return found
