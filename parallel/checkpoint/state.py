"""What a checkpoint holds of a policy, under names and shapes that no layout knows.

Weights stand under the model's own names and the optimizer's tensors under
`optimizer.state.NAME.WEIGHT`, whole, whether the optimizer is plain or distributed. Everything else
that an optimizer holds (rates, decays, betas) is the configuration's and is not read back.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    nested_items_iter,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import distributed as dist

from parallel.checkpoint import optimizer_shards as optimizer_boxes
from parallel.model.policy import Policy, TrainedPolicy

# Asks megatron-core for the form of its state that any other layout can load. It is given copies,
# since it writes its process groups into them.
METADATA = MappingProxyType(
    {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
)

State = dict[Any, Any]


def weights(policy: Policy, head: bool = True) -> State:
    """This rank's shards of the model; without the `head`, that stays as it is here."""
    state = {
        number: chunk.sharded_state_dict(metadata=dict(METADATA))
        for number, chunk in enumerate(policy.chunks)
    }
    for shards in state.values():
        for name, shard in shards.items():
            # A layer's objects are TransformerEngine's scales of 8-bit formats, which no policy
            # has, and TransformerEngine unpickles what it is given of them.
            if isinstance(shard, ShardedObject) or (not head and _of_head(name)):
                shards[name] = LocalNonpersistentObject(shard.data)
    return state


def trained(policy: TrainedPolicy) -> State:
    """What there is to save of a model that trains: this rank's shards, and the updates so far."""
    return {
        "weights": weights(policy),
        "optimizer": optimizer_to_save(policy),
        "updates": policy.schedule.num_steps,
    }


def companions(policy: TrainedPolicy) -> State:
    """The same of the models that train with the policy."""
    return {name: under(f"{name}.", trained(other)) for name, other in policy.companions.items()}


def averages(policy: TrainedPolicy) -> State:
    """This rank's shards of the models that are saved with the policy."""
    return {name: under(f"{name}.", weights(average)) for name, average in policy.averages.items()}


def under(prefix: str, state: State) -> State:
    """The same shards, whose names in the checkpoint begin with `prefix`."""
    add_prefix_for_sharding(state, prefix)
    return state


def restore_weights(policy: Policy, loaded: State) -> None:
    """Take loaded weights, also into the optimizer's own copies of them."""
    for number, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(loaded[number], strict=True)
    policy.weights_changed()


def optimizer_to_save(policy: TrainedPolicy) -> State:
    """This rank's shards of the optimizer's tensors, and nothing else of it."""
    if not _distributed(policy):  # whole tensors either way
        return optimizer_to_load(policy)
    model = filter(_is_weight, nested_values(weights(policy)))
    shards = {id(shard.data): shard for shard in model}
    return {n: optimizer_boxes.shards(part, shards) for n, part in enumerate(_materialised(policy))}


def optimizer_to_load(policy: TrainedPolicy) -> State:
    """What this rank needs of the optimizer's tensors; the rest of it stays as it is here."""
    _materialised(policy)
    model = weights(policy)
    # A plain optimizer is not told that it loads: megatron-core's own materialisation knows no SGD.
    state = policy.optimizer.sharded_state_dict(
        model, is_loading=_distributed(policy), metadata=dict(METADATA)
    )
    _name_masters(state, model)
    return dict_list_map_inplace(_only_shards, state)


def restore_optimizer(policy: TrainedPolicy, loaded: State, updates: int) -> None:
    """Take loaded tensors and go on after so many updates, at the rates of our own schedule."""
    policy.optimizer.load_state_dict(loaded)
    for group in policy.optimizer.param_groups:
        if "betas" in group:  # Adam counts its updates
            group["step"] = updates
    policy.schedule.num_steps = updates
    policy.schedule.step(0)


def random_numbers() -> ShardedObject:
    """The states of this rank's random generators, which only the same layout can take back."""
    states = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("random_numbers", states, (dist.get_world_size(),), (dist.get_rank(),))


def restore_random_numbers(states: State) -> None:
    """Take back what `random_numbers` gave to a rank of the same number."""
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _distributed(policy: TrainedPolicy) -> bool:
    return isinstance(policy.optimizer.chained_optimizers[0], DistributedOptimizer)


def _materialised(policy: TrainedPolicy) -> list[Any]:
    """The optimizer's parts, dense and experts, with every parameter's state as a step leaves it.

    megatron-core reads and fills that state by its structure, and cannot create momentum buffers.
    """
    for part in policy.optimizer.chained_optimizers:
        inner = part.optimizer
        names = ("exp_avg", "exp_avg_sq") if "betas" in inner.defaults else ("momentum_buffer",)
        for parameter in (each for group in inner.param_groups for each in group["params"]):
            for name in names:
                if inner.state[parameter].get(name) is None:
                    inner.state[parameter][name] = torch.zeros_like(parameter)
    return policy.optimizer.chained_optimizers


def _name_masters(state: State, model: State) -> None:
    """Give the distributed optimizer's master weights the names of the plain optimizer's.

    The plain one keeps an fp32 copy of 16-bit weights only; an fp32 weight is its own master, and
    is read once more as such.
    """
    kinds = {shard.key: shard.data.dtype for shard in filter(_is_weight, nested_values(model))}
    for entry, name, shard in list(nested_items_iter(state)):
        if name == "param":
            weight = shard.key.removeprefix("optimizer.state.param.")
            prefix = "" if kinds[weight] == torch.float32 else "optimizer.state.fp32_param."
            entry[name] = replace(shard, key=prefix + weight)


def _of_head(name: str) -> bool:
    return name.startswith("output_layer.")


def _is_weight(shard: Any) -> bool:
    return isinstance(shard, ShardedBase) and torch.is_tensor(shard.data)


def _only_shards(value: Any) -> Any:
    """Leave out of a checkpoint, and take from here when loading, all that is not a shard."""
    if isinstance(value, ShardedBase | LocalNonpersistentObject):
        return value
    return LocalNonpersistentObject(value)
