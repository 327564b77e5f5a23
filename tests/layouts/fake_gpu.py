"""A GPU that is not there: tensors that say they are on a device, and whose values the CPU holds.

An operation that mixes such a tensor with one of the CPU fails as on a GPU, and `.device` is the
fake one's, so that a tensor made without a device is found wherever it meets one of the model.
Megatron's CUDA calls, which parallel.cpu.megatron answers with the CPU, get this device instead.
Its kernels are the CPU's. The first GPU run found a loss on the CPU that no test without a GPU
could see, since there every tensor is.

    python -m tests.layouts.fake_gpu        runs the steps of a policy, and prints their losses
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

GPU = torch.device("privateuseone", 0)
NAME = "gpu"  # of the device's type, as torch prints it
aten = torch.ops.aten
# CUDA's kernels take tensors of both sides here: copies, and indices on the host.
MIXED = {
    *(aten.copy_, aten._to_copy),
    *(aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_),
}


class GpuTensor(torch.Tensor):
    """A tensor of `GPU`, with the values of the CPU tensor `host`.

    Example: `torch.ones(2, device=GPU)` has device gpu:0 and host tensor([1., 1.]);
    `torch.ones(2, device=GPU) + torch.ones(2)` raises, `torch.ones(2, device=GPU) + 1` does not.
    """

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> GpuTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=GPU,
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, op: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return _run(op, arguments, keywords or {})

    def tolist(self) -> Any:
        """Return the values; torch refuses to for subclasses."""
        return self.host.tolist()

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; what Megatron's buffers assign moves the values too."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        vars(torch._C.TensorBase)["data"].__set__(self, value)  # its shape and strides
        self.host = value.host


class FakeGpu(TorchDispatchMode):
    """The mode in which factories with `device=GPU` make tensors of it."""

    def __torch_dispatch__(self, op: Any, _: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return _run(op, arguments, keywords or {})


def _run(op: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
    """Run an operation on the values, and return tensors of the device that torch would choose."""
    leaves = pytree.tree_leaves((arguments, keywords))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    on_gpu = any(isinstance(tensor, GpuTensor) for tensor in tensors)
    if on_gpu and op.overloadpacket not in MIXED:
        _check_devices(op, tensors)
    place = keywords.get("device")
    to_gpu = on_gpu if place is None else torch.device(place).type == GPU.type
    if op.overloadpacket is aten.copy_:
        to_gpu = isinstance(arguments[0], GpuTensor)
    if place is not None:
        keywords = {**keywords, "device": torch.device("cpu")}
    host_arguments, host_keywords = pytree.tree_map_only(
        GpuTensor, lambda tensor: tensor.host, (arguments, keywords)
    )
    result = op(*host_arguments, **host_keywords)
    if not to_gpu:
        return result
    result = pytree.tree_map_only(torch.Tensor, GpuTensor, result)
    return return_and_correct_aliasing(op, arguments, keywords, result) if on_gpu else result


def _check_devices(op: Any, tensors: list[torch.Tensor]) -> None:
    """Raise RuntimeError where a tensor is on the CPU; a number, of no dimensions, may be."""
    for tensor in tensors:
        if not isinstance(tensor, GpuTensor) and tensor.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{GPU} and {tensor.device}: {op} of {tuple(tensor.shape)}"
            )


def pretend() -> None:
    """Make `GPU` the device of parallel and of Megatron, in a process that has imported neither."""
    _setup_privateuseone_for_python_backend(NAME)
    # torch.tensor(values, device=GPU) is then made on the CPU, and moved.
    torch._C._set_only_lift_cpu_tensors(True)
    import parallel.machine.device

    parallel.machine.device.device = lambda: GPU
    parallel.machine.device.LOSS_CHUNK_BYTES[NAME] = 1 << 14
    from parallel.cpu import megatron

    megatron.CPU = GPU
    _patch_torch()
    megatron.activate()
    kind = torch.Tensor.type

    def cuda_kind(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        answer = kind(tensor, *arguments, **keywords)
        return answer.replace(f".{NAME}.", ".cuda.") if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_kind  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor.to(GPU)  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda module, *_, **__: module.to(GPU)  # type: ignore[method-assign]


def _patch_torch() -> None:
    """Let torch.tensor read numbers of the fake GPU, as it reads those of a real one."""
    make = torch.tensor

    def tensor(values: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        numbers = pytree.tree_map_only(GpuTensor, lambda number: number.host.item(), values)
        return make(numbers, *arguments, **keywords)

    torch.tensor = tensor  # type: ignore[assignment]


def results() -> dict[str, float]:
    """Return losses and gradient norms of what trains and is compared, in one rank's process."""
    from parallel.settings import LayoutSettings, RoutingLossSettings
    from stages.sampling.logprob_check import measure_mismatch
    from tests.layouts import cases, critic_cases, method_cases

    values: dict[str, float] = {}
    losses = RoutingLossSettings(load_balance=1e-2, z_loss=1e-3)  # counted in a pass of its own
    policy, teacher = (cases.build(LayoutSettings(), losses=losses) for _ in range(2))
    samples = cases.keep(cases.samples(12, routes=True))
    for loss in cases.LOSSES:
        micro_batches = cases.prepared(loss, samples, teacher, count=2, replay=True)
        values |= {f"{loss} {name}": value for name, value in _mismatch(policy, micro_batches)}
        values[loss] = cases.accumulate(policy, loss, samples, micro_batches)["loss"]
        values[f"{loss} norm"] = policy.step()
    values |= measure_mismatch(policy, micro_batches, 0.7, entropies=True).metrics
    learned = critic_cases.learn(*critic_cases.build(LayoutSettings(), "adam"), range(2))
    values |= {f"critic {number}": value for number, value in enumerate(learned)}
    models = method_cases.models(LayoutSettings())
    for method in method_cases.METHODS:
        values[method] = method_cases.accumulated(method, models, cases.samples(12), 2)
    return values


def _mismatch(policy: Any, micro_batches: Any) -> list[tuple[str, float]]:
    """Return the sums of log-probabilities, and of the routers' movement since."""
    policy.remember_routing()
    logprobs = policy.target_logprobs(micro_batches, 0.7)
    movement = policy.router_movement(micro_batches)
    sums = ([tensor.sum().item() for tensor in tensors] for tensors in (logprobs, movement))
    return list(zip(("logprobs", "movement"), map(sum, sums), strict=True))


def main() -> None:
    """Print `results` on the fake GPU as a line of JSON."""
    warnings.filterwarnings("ignore")
    pretend()
    from tests.gpu.part import one_rank

    with FakeGpu(), one_rank():
        print(json.dumps(results()))


if __name__ == "__main__":
    main()
