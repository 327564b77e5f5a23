"""Ranks of real sizes without their memory: a process that answers requests, line by line.

It builds Braid's policy from TransformerEngine's real modules, with megatron-core's buckets of
gradients and TransformerEngine's optimizer, as any rank of any layout: the process groups are
torch's fake ones, and the tensors have shapes and no storage. It runs in the environment of
`tests.te_python`; its stand-ins would break other tests in one process. Requests and answers are
lines of JSON.
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import sys
import traceback
import types
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# TransformerEngine's Python mirrors these enumerations of its extension while it is imported, and
# asserts that the members are the same (constants.py and cpp_extensions/fused_attn.py).
ENUMERATIONS = {
    "DType": enum.IntEnum(
        "DType",
        "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    ),
    "NVTE_Fused_Attn_Backend": enum.IntEnum(
        "NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8"
    ),
}


class _Empty(type):
    """The metaclass of empty classes, whose attributes are empty classes too (as of enums).

    A member of an enumeration is a number for its name.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)

    def __int__(cls) -> int:
        return zlib.crc32(cls.__name__.encode())


def _empty(name: str) -> Any:
    return _Empty(name, (), {"__init__": lambda *_, **__: None})


class _StandIn(types.ModuleType):
    """A module whose attributes are empty classes, and whose decorators change nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "jit":
            return lambda function=None, **_: function or (lambda other: other)
        if name in ("autotune", "heuristics"):
            return lambda *_, **__: lambda function: function
        return _empty(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds triton and TransformerEngine's compiled extension, which need CUDA."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ("triton", "transformer_engine_torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(__version__="3.7.1", **ENUMERATIONS)


def install() -> None:
    """Import the real TransformerEngine, and then pretend that there is CUDA."""
    for name in ("torch._dynamo", "torch._inductor.utils", "torch.utils._triton"):
        importlib.import_module(name)  # they look for triton once, and must not find a stand-in
    for name in ("has_triton_package", "has_triton"):
        getattr(importlib.import_module("torch.utils._triton"), name)()
    sys.meta_path.insert(0, _Finder())
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: importlib.import_module(
        f"transformer_engine_{framework}"
    )
    importlib.import_module("transformer_engine.pytorch")
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine."):
            for function, answer in (
                ("get_cudnn_version", (9, 20, 0)),
                ("get_device_compute_capability", (9, 0)),
            ):
                if hasattr(module, function):
                    setattr(module, function, lambda answer=answer: answer)

    from parallel.cpu import megatron
    from parallel.machine import device

    megatron.SCOPED_PACKAGES = (*megatron.SCOPED_PACKAGES, "transformer_engine")
    has_cuda = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    assert device.layer_specs() == "transformer_engine"  # decided once, for the whole process
    torch.cuda.is_available = has_cuda
    megatron.activate()
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.backends.cudnn.version = lambda: 92000
    for name in ("routing", "offload", "host_state"):
        module: Any = importlib.import_module(f"parallel.model.{name}")
        module.device = lambda: torch.device("cpu")
    create = dist.new_group
    # Of gloo's groups, which would wait for the other ranks.
    dist.new_group = lambda *arguments, backend=None, **keywords: create(*arguments, **keywords)
    # The ranks have equal groups of parameters.
    dist.all_gather_object = _everyone_has
    # Fake weights are drawn from no generator.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    # Fake parameters cannot be changed; they have their dtype from the start, but for sinks.
    torch.nn.Module.to = lambda self, *_, **__: self
    torch.nn.Module.bfloat16 = _with_sinks_in_bf16


def _with_sinks_in_bf16(module: Any) -> Any:
    """Replace TransformerEngine's attention sinks, which it creates in fp32."""
    for part in module.modules():
        if (sinks := getattr(part, "softmax_offset", None)) is not None:
            part.softmax_offset = torch.nn.Parameter(sinks.bfloat16())
            vars(part.softmax_offset).update(vars(sinks))
    return module


def _everyone_has(object_list: list[Any], obj: Any, **_: Any) -> None:
    object_list[:] = [obj] * len(object_list)


@contextmanager
def rank_of(layout: Any, rank: int) -> Iterator[None]:
    """Be a rank of a layout, whose collectives do nothing."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
    try:
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=True,
        )
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def errors_of_names(policy: Any, model: Any, layout: Any, rank: int) -> list[str]:
    """Return the differences between a rank's tensors and the plan's, in name, size and dtype."""
    from parallel.machine.device import DTYPES
    from parallel.weights.holdings import held
    from parallel.weights.names import is_precise

    planned: Counter[str] = Counter()
    precise = set()
    for piece in held(model, layout, rank):
        name = f"{piece.chunk}/{piece.parameter}"
        planned[name] += math.prod(piece.box[1])
        if is_precise(piece.tensor):
            precise.add(name)
    tensors = policy.named_weights()
    errors = []
    for name in sorted(tensors.keys() | planned.keys()):
        size = tensors[name].numel() if name in tensors else 0
        if size != planned[name]:
            errors.append(f"{name}: {size} elements, planned {planned[name]}")
        dtype = torch.float32 if name in precise else DTYPES[model.precision]
        if name in tensors and tensors[name].dtype != dtype:
            errors.append(f"{name}: {tensors[name].dtype}, not {dtype}")
    return errors


def held_bytes(policy: Any) -> dict[str, int]:
    """Return the bytes of a rank's weights, gradients and optimizer state."""
    from parallel.checkpoint.state import _materialised

    buffers = [b for m in policy.modules for b in m.buffers + m.expert_parallel_buffers]
    state: list[torch.Tensor] = []
    for part in _materialised(policy):
        for group in part.optimizer.param_groups:
            if not part.config.use_precision_aware_optimizer:  # else they are the weights
                state += group["params"]
        for tensors in part.optimizer.state.values():
            state += [tensor for tensor in tensors.values() if torch.is_tensor(tensor)]
    return {
        "parameters": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": sum(tensor.nbytes for tensor in state),
    }


def saved(policy: Any) -> list[tuple[str, list[int], list[int], list[int], bool]]:
    """Return the shards of a rank's weights in a checkpoint.

    As (name, whole shape, offset, shape, true if this rank writes it and no replica).
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    from parallel.checkpoint.state import weights

    built: list[Any] = []
    for shard in nested_values(weights(policy)):
        gated = isinstance(shard, ShardedTensorFactory)
        built += nested_values([shard.build()]) if gated else [shard]
    found = []
    for part in built:
        if isinstance(part, ShardedTensor):
            shape = [1] * part.prepend_axis_num + list(part.local_shape)
            first = part.replica_id in (0, (0, 0, 0))
            whole, offset = list(part.global_shape), list(part.global_offset)
            found.append((part.key, whole, offset, shape, first))
    return found


def ranks(
    model: dict[str, Any],
    layout: dict[str, Any],
    numbers: list[int],
    precision_aware: bool = False,
) -> list[dict[str, Any]]:
    """Return what each of some ranks of a policy in training holds."""
    from parallel.model.policy import TrainedPolicy
    from parallel.settings import (
        LayoutSettings,
        ModelSettings,
        OptimizerSettings,
        RoutingLossSettings,
    )

    settings, sizes = ModelSettings(**model), LayoutSettings(**layout)
    optimizer = OptimizerSettings(learning_rate=1e-3, precision_aware=precision_aware)
    found = []
    for rank in numbers:
        with rank_of(sizes, rank):
            policy = TrainedPolicy(settings, sizes, optimizer, 10, RoutingLossSettings())
            modules = (module for chunk in policy.chunks for module in chunk.modules())
            found.append(
                {
                    "errors": errors_of_names(policy, settings, sizes, rank),
                    "bytes": held_bytes(policy),
                    "modules": sorted({type(module).__name__ for module in modules}),
                    "shards": saved(policy),
                }
            )
    return found


def bf16_moments_round_trip(
    model: dict[str, Any], directory: str, saved: float = 0.0, loaded: float = 0.0
) -> dict[str, Any]:
    """Save the state of a precision-aware optimizer and load it into another; one real rank.

    Shares of `saved` and `loaded` are in host memory. Returns the dtypes of the tensors, the names
    that the checkpoint lacks or that differ after loading, the largest difference of the masters
    from weights changed afterwards, and the share of the elements that is then in host memory.
    """
    from megatron.core import dist_checkpointing, parallel_state

    from parallel.checkpoint import state
    from parallel.model.policy import TrainedPolicy
    from parallel.settings import (
        LayoutSettings,
        ModelSettings,
        OptimizerSettings,
        RoutingLossSettings,
    )

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
        sizes = ModelSettings(**model), LayoutSettings()
        first, second = (
            TrainedPolicy(
                *sizes,
                OptimizerSettings(learning_rate=1e-3, precision_aware=True, cpu_offload=share),
                10,
                RoutingLossSettings(),
            )
            for share in (saved, loaded)
        )
        for tensor in _adam_tensors(first).values():
            tensor.copy_(torch.randn(tensor.shape))
        dist_checkpointing.save({"optimizer": state.optimizer_to_save(first)}, directory)
        wanted = {"optimizer": state.optimizer_to_load(second)}
        found = dist_checkpointing.load(wanted, directory)
        state.restore_optimizer(second, found["optimizer"], updates=3)
        ours, theirs = _adam_tensors(first), _adam_tensors(second)
        different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        with torch.no_grad():
            for parameter in second.chunks[0].parameters():
                parameter.add_(1)
        second.weights_changed()
        moved = 0.0
        for part in second.optimizer.chained_optimizers:
            for weight, tensors in part.optimizer.state.items():
                moved = max(moved, float((tensors["master_param"] - weight).abs().max()))
        host = second.host_state.bytes.untyped_storage()._cdata
        everything = list(_adam_tensors(second).values())
        on_host = [each for each in everything if each.untyped_storage()._cdata == host]
        return {
            "dtypes": {name.split()[0]: str(tensor.dtype) for name, tensor in theirs.items()},
            "different": different,
            "steps": sorted({group["step"] for group in second.optimizer.param_groups}),
            "master_difference": moved,
            "on_host": sum(each.numel() for each in on_host) / sum(e.numel() for e in everything),
        }
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _adam_tensors(policy: Any) -> dict[str, torch.Tensor]:
    """Return every tensor of the optimizer's state, by "NAME PART PARAMETER"."""
    from parallel.checkpoint.state import _materialised

    found = {}
    for part, each in enumerate(_materialised(policy)):
        for number, tensors in enumerate(each.optimizer.state.values()):
            found |= {f"{name} {part} {number}": tensor for name, tensor in tensors.items()}
    return found


def missing_names() -> list[str]:
    """Return the names that megatron-core imports from TransformerEngine and that it lacks.

    megatron-core takes an ImportError for an older version, and falls back without a word.
    """
    found = set()
    for path in Path(importlib.import_module("megatron.core").__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                package, _, inside = node.module.partition(".")
                if package == "transformer_engine" and inside:
                    found |= {(node.module, alias.name) for alias in node.names}
    return sorted(f"{module}.{name}" for module, name in found if not _has(module, name))


def _has(module: str, name: str) -> bool:
    try:
        return (
            hasattr(importlib.import_module(module), name)
            or util.find_spec(f"{module}.{name}") is not None
        )
    except ModuleNotFoundError:
        return False


ANSWERS = {
    "ranks": ranks,
    "bf16_moments_round_trip": bf16_moments_round_trip,
    "missing_names": missing_names,
}


def main() -> None:
    """Answer the requests of standard input; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore")
    install()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = {"found": ANSWERS[request.pop("ask")](**request)}
        except BaseException:
            found = {"error": traceback.format_exc()}
        print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
