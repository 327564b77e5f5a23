"""The state of a policy in a checkpoint, under names and shapes that do not depend on the layout.

Weights have the model's names and the optimizer's tensors `optimizer.state.NAME.WEIGHT`, whole,
whether the optimizer is plain or distributed. An optimizer's rates, decays and betas come from the
configuration and are not read back.

A data-parallel rank of a distributed optimizer owns ranges of the flattened weights, which begin
and end within a row. megatron-core's own layout-independent form (fully_reshardable) gathers all of
that state on every data-parallel rank before it saves. But a range is a few boxes (the end of a
row, whole rows, the beginning of a row), and a checkpoint may hold a tensor in any boxes: so no
data needs to move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    nested_items_iter,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import distributed as dist

from parallel.distributed import layout_sizes
from parallel.model.host_state import allocate
from parallel.model.offload import STATE
from parallel.model.policy import Policy, TrainedPolicy
from parallel.weights.boxes import boxes

# Makes megatron-core write a state that any layout can load. Always pass a copy: megatron-core
# writes its process groups into it.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}

State = dict[Any, Any]


def weights(policy: Policy, head: bool = True) -> State:
    """Return this rank's shards of the model; without `head`, loading leaves the head unchanged."""
    policy.residency.hold()
    state = {}
    for number, chunk in enumerate(policy.chunks):
        state[number] = shards = chunk.sharded_state_dict(metadata=dict(METADATA))
        for name, shard in shards.items():
            # The objects of a layer are TransformerEngine's FP8 scales, which no policy uses, and
            # which TransformerEngine would unpickle.
            without = not head and name.startswith("output_layer.")
            if without or isinstance(shard, ShardedObject):
                shards[name] = LocalNonpersistentObject(shard.data)
    return state


def whole(policy: Policy) -> State:
    """Return this rank's shards of a whole checkpoint: of a policy not in training, its weights."""
    if not isinstance(policy, TrainedPolicy):
        return {"weights": weights(policy)}
    companions = policy.companions.items()
    return {
        **_trained(policy),
        "averages": averages(policy),
        "companions": {name: under(f"{name}.", _trained(other)) for name, other in companions},
        "random_numbers": random_numbers(),
        "layout": layout_sizes(policy.bridge.config),
    }


def _trained(policy: TrainedPolicy) -> State:
    return {
        "weights": weights(policy),
        "optimizer": optimizer_to_save(policy),
        "updates": policy.schedule.num_steps,
    }


def averages(policy: TrainedPolicy) -> State:
    """Return this rank's shards of the averages of the policy."""
    return {name: under(f"{name}.", weights(average)) for name, average in policy.averages.items()}


def on_device(policy: Policy) -> AbstractContextManager[None]:
    """Return a context in which all models of a checkpoint are on the device, as `whole` needs."""
    models: list[Policy] = [policy]
    if isinstance(policy, TrainedPolicy):
        models += [*policy.averages.values(), *policy.companions.values()]
    return policy.residency.share.together((model.residency for model in models), STATE)


def under(prefix: str, state: State) -> State:
    """Prepend `prefix` to the shards' names in the checkpoint; return the state."""
    add_prefix_for_sharding(state, prefix)
    return state


def restore_weights(policy: Policy, loaded: State) -> None:
    """Restore loaded weights, also in the optimizer's copies of them."""
    policy.residency.hold()
    for number, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(loaded[number], strict=True)
    policy.weights_changed()


def optimizer_to_save(policy: TrainedPolicy) -> State:
    """Return this rank's shards of the optimizer's tensors."""
    if not _distributed(policy):  # whole tensors either way
        return optimizer_to_load(policy)
    model = filter(_is_weight, nested_values(weights(policy)))
    shards = {id(shard.data): shard for shard in model}
    return {
        n: _owned_shards(optimizer, shards) for n, optimizer in enumerate(_materialised(policy))
    }


def optimizer_to_load(policy: TrainedPolicy) -> State:
    """Return what this rank loads of the optimizer; all but its tensors stays unchanged."""
    _materialised(policy)
    model = weights(policy)
    if _distributed(policy):
        # Not `sharded_state_dict`, which has TransformerEngine's Adam allocate its state again, on
        # the device, also of parameters whose state is on the host.
        state: State = {
            number: optimizer.sharded_param_state_fully_reshardable(model, True, dict(METADATA))
            for number, optimizer in enumerate(policy.optimizer.chained_optimizers)
        }
    else:
        # Without is_loading: megatron-core 0.19.2 (optimizer.py) would allocate Adam's state only.
        state = policy.optimizer.sharded_state_dict(model, metadata=dict(METADATA))
    # The distributed optimizer's master weights get the names of the plain one's, which keeps fp32
    # copies of 16-bit weights only: an fp32 weight is its own master, and is read as such again.
    dtypes = {shard.key: shard.data.dtype for shard in filter(_is_weight, nested_values(model))}
    for entry, name, shard in list(nested_items_iter(state)):
        if name == "param":
            weight = shard.key.removeprefix("optimizer.state.param.")
            prefix = "" if dtypes[weight] == torch.float32 else "optimizer.state.fp32_param."
            entry[name] = replace(shard, key=prefix + weight)
    kinds = (ShardedBase, LocalNonpersistentObject)
    return dict_list_map_inplace(
        lambda value: value if isinstance(value, kinds) else LocalNonpersistentObject(value), state
    )


def restore_optimizer(policy: TrainedPolicy, loaded: State, updates: int) -> None:
    """Restore loaded tensors and the schedule after `updates` updates."""
    policy.residency.hold(STATE)
    if _distributed(policy):
        for number, optimizer in enumerate(policy.optimizer.chained_optimizers):
            optimizer.load_parameter_state_from_fully_reshardable(loaded[number])
    else:
        policy.optimizer.load_state_dict(loaded)
    for group in policy.optimizer.param_groups:
        if "betas" in group:  # Adam counts its updates
            group["step"] = updates
    policy.schedule.num_steps = updates
    policy.schedule.step(0)


def random_numbers() -> ShardedObject:
    """Return the states of this rank's random generators; only the same layout can restore them."""
    states = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("random_numbers", states, (dist.get_world_size(),), (dist.get_rank(),))


def restore_random_numbers(states: State) -> None:
    """Restore the result of `random_numbers` of a rank with the same number."""
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _distributed(policy: TrainedPolicy) -> bool:
    return isinstance(policy.optimizer.chained_optimizers[0], DistributedOptimizer)


def _materialised(policy: TrainedPolicy) -> list[Any]:
    """Return the optimizer's parts, dense and experts, with the state of every parameter allocated.

    megatron-core reads and fills that state by its structure, and cannot create momentum buffers.
    """
    policy.residency.hold(STATE)
    for optimizer in policy.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                allocate(optimizer, parameter)
    return policy.optimizer.chained_optimizers


def _is_weight(shard: Any) -> bool:
    return isinstance(shard, ShardedBase) and torch.is_tensor(shard.data)


def _owned_shards(optimizer: DistributedOptimizer, weights: dict[int, Any]) -> list[ShardedTensor]:
    """Return this rank's shards of the optimizer's tensors; `weights` by the id of the parameter.

    Without the master weights of fp32 parameters, which are the weights themselves.
    """
    shards: list[ShardedTensor] = []
    buckets = [
        b
        for buffer in optimizer.gbuf_ranges
        for dtype_buckets in buffer.values()
        for b in dtype_buckets
    ]
    for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
        start, stop = ranges["param"].start, ranges["param"].end  # that this rank updates
        # Owned by this rank: the last number of a replica's is that of the data-parallel rank.
        weight = weights[id(parameter)]
        weight = replace(weight, replica_id=(*weight.replica_id[:2], 0))
        # The weight of a gated layer is two tensors of the checkpoint, one after the other.
        gated = isinstance(weight, ShardedTensorFactory)
        for piece in nested_values([weight.build()]) if gated else [weight]:
            begin = _position(piece, parameter)
            lower, upper = max(start, begin), min(stop, begin + piece.data.numel())
            for name, flat in optimizer._get_main_param_and_optimizer_states(parameter).items():
                if name == "param" and parameter.dtype == torch.float32:
                    continue
                key = f"optimizer.state.{'fp32_param' if name == 'param' else name}.{piece.key}"
                held = flat[lower - start : max(lower, upper) - start]
                shards += _cut(replace(piece, key=key, data=None), held, lower - begin)
    return shards


def _position(piece: ShardedTensor, parameter: torch.nn.Parameter) -> int:
    """Return the offset of a piece in the flattened parameter."""
    memory = parameter.untyped_storage().data_ptr()
    if piece.data.untyped_storage().data_ptr() != memory or not piece.data.is_contiguous():
        # megatron-core rearranges the weight for its checkpoint.
        raise NotImplementedError(f"{piece.key} is not a plain part of its parameter")
    return (piece.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()


def _cut(piece: ShardedTensor, flat: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """Yield a range of a piece, from `start`, as separate shards."""
    extra = piece.prepend_axis_num
    for offsets, sizes in boxes(piece.local_shape, start, start + flat.numel()):
        count = math.prod(sizes)
        box, flat = flat[:count].view((1,) * extra + sizes), flat[count:]
        inner = (at + by for at, by in zip(piece.global_offset[extra:], offsets, strict=True))
        yield replace(
            piece,
            data=box,
            dtype=box.dtype,
            local_shape=tuple(box.shape),
            global_offset=(*piece.global_offset[:extra], *inner),
            axis_fragmentations=None,  # no regular grid
            prepend_axis_num=0,
        )
