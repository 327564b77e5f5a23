"""Adam's state in host memory, which the device's own kernels read and write.

megatron-core 0.19.2 offloads Adam with HybridDeviceOptimizer, which updates with another Adam on
the host: its bits differ from the device's. It also loads a checkpoint by a step on random
gradients, keeps its moments in fp32, and without precision-aware Adam leaves the master weights on
the device. Here the tensors alone move: CUDA maps pinned host memory into the device's address
space, and the optimizer, its gradients, clipping and checkpoints see tensors of the device as
before. An update gives the same bits, whatever share of the state is on the host; it reads and
writes that share over the bus once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallel.machine.device import device
from parallel.model.offload import HostMemory, aligned

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostState:
    """The state of a share of Adam's parameters: moments and fp32 master weights, on the host.

    An fp32 weight is its own master and stays on the device. The parameters are whole tensors, the
    first of each of the optimizer's parts, until they have at least the share of its elements.
    """

    def __init__(self, optimizer: Any, share: float) -> None:
        """Move the state, and allocate it where Adam has not yet; `share` 0 moves nothing."""
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device())
        self._used = 0
        if not share:
            return
        offloaded = [
            (chained, parameter)
            for chained in optimizer.chained_optimizers
            for parameter in _leading(chained, share)
        ]
        size = sum(_size(chained, parameter) for chained, parameter in offloaded)
        self._memory = HostMemory(size, pinned=device().type == "cuda", mapped=True)
        self.bytes = self._memory.on_device()
        for chained, parameter in offloaded:
            allocate(chained, parameter)
            state = chained.optimizer.state[parameter]
            for name in list(state):
                state[name] = self._placed(state[name])
            if _has_master(chained, parameter):
                parameter.data = self._placed(parameter.data)
        assert self._used == size

    def _placed(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, a tensor of the device."""
        start, self._used = self._used, self._used + aligned(tensor.nbytes)
        host_copy = self.bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return host_copy.copy_(tensor)


def allocate(chained: Any, parameter: Tensor) -> None:
    """Allocate the state of one parameter of a part of the optimizer, unless it is allocated."""
    inner = chained.optimizer
    if chained.config.use_precision_aware_optimizer:  # of dtypes that only it knows
        if not inner.state[parameter]:
            inner.initialize_state(parameter, store_param_remainders=False)
        return
    for name in MOMENTS if "betas" in inner.defaults else ("momentum_buffer",):
        if inner.state[parameter].get(name) is None:
            inner.state[parameter][name] = torch.zeros_like(parameter)


def _leading(chained: Any, share: float) -> Iterator[Tensor]:
    """Yield the first parameters of a part, until they have the share of its elements."""
    parameters = [
        parameter for group in chained.optimizer.param_groups for parameter in group["params"]
    ]
    enough = share * sum(parameter.numel() for parameter in parameters)
    taken = 0
    for parameter in parameters:
        if taken >= enough:
            return
        taken += parameter.numel()
        yield parameter


def _size(chained: Any, parameter: Tensor) -> int:
    """Return the bytes that a parameter's state takes in host memory."""
    dtypes = [torch.float32] * (2 + _has_master(chained, parameter))
    if chained.config.use_precision_aware_optimizer:  # the master is in Adam's state
        dtypes = [chained.config.exp_avg_dtype, chained.config.exp_avg_sq_dtype, torch.float32]
    return sum(aligned(parameter.numel() * dtype.itemsize) for dtype in dtypes)


def _has_master(chained: Any, parameter: Tensor) -> bool:
    """Return whether a parameter of the optimizer is an fp32 copy of a 16-bit weight."""
    copies = chained.shard_fp32_from_float16_groups
    return any(master is parameter for group in copies for master in group)
