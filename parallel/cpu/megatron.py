"""The patches of megatron-core 0.19.2 and mbridge for machines without CUDA.

With CUDA `activate()` replaces only what TransformerEngine would bring, and only where it is
missing. Without CUDA, Megatron's modules see a `torch` whose CUDA calls answer for the CPU. The
substitution is scoped: every Megatron (and mbridge) module gets a proxy in place of its global name
`torch`. The real `torch` keeps its factories, so that Hugging Face, vLLM and everything else are
unaffected.
(Patching the factories of the real module silently zeroes rotary frequencies loaded by
transformers: `torch.device` contexts cache the factories they first saw.)

Four methods of Tensor, one of Module and the constructor of gloo's process groups
(parallel.cpu.gloo) are the only global changes. The patched methods of Tensor and Module only
accept calls that would raise on a build without CUDA, except Tensor.type, whose result changes for
callers in Megatron alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adam import adam

from parallel.cpu import gloo
from parallel.machine.cuda_packages import hide
from parallel.machine.device import CPU, has_apex, layer_specs

SCOPED_PACKAGES = ("megatron", "mbridge")
# Imported before the names are replaced, so that what a stage uses is covered.
ENTRY_POINTS = (
    "megatron.core.parallel_state",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mimo.optimizer",  # imported by every optimizer that is built
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.post_training.modelopt.layers",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.router_replay",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
    "mbridge",
)
FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"),
    *("linspace", "ones", "ones_like", "rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
)


@functools.cache
def activate() -> None:
    """Make megatron-core and mbridge importable and runnable on this machine.

    megatron-core must use a package exactly where Braid does: a TransformerEngine or apex that
    Braid does not use is hidden from it, since it would compute with either even without CUDA.
    """
    cuda = torch.cuda.is_available()
    local = layer_specs() == "local"
    if local:
        hide("transformer_engine")
    if not has_apex():
        hide("apex")
    if not cuda:
        # torch.compile on a CPU costs more start-up time than its fusions save; it must be off
        # before Megatron's modules are decorated with it.
        importlib.import_module("megatron.core.jit").disable_jit_fuser()
        _accept_cuda_on_tensors()
        gloo.share_device()
    for name in ENTRY_POINTS:
        importlib.import_module(name)
    _count_adam_steps_by_group()
    if local:
        _admit_replicated_projections()
    if cuda:
        return
    proxy = _TorchWithoutCuda()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in SCOPED_PACKAGES and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = proxy
    _patch_megatron()


def _answer(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


_nothing = _answer(None)


class _CpuStream(contextlib.nullcontext):
    """A stand-in for CUDA streams and events: all work is already ordered and finished."""

    cuda_stream = 0
    query = _answer(True)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(self)

    def record_event(self, *_: Any) -> _CpuStream:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class _CudaOfTheCpu(types.ModuleType):
    """The torch.cuda that Megatron sees: one device, the CPU, and its random generator."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.Stream = self.Event = _CpuStream
        self.current_device, self.device_count = _answer(CPU), _answer(1)
        self.current_stream = self.default_stream = _answer(_CpuStream())
        self.stream = lambda *_: contextlib.nullcontext()
        self.is_current_stream_capturing = _answer(False)
        self.synchronize = self.set_device = self.empty_cache = self.ipc_collect = _nothing
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
            setattr(self, name, _answer(0))
        self.get_rng_state = lambda *_, **__: torch.get_rng_state()
        self.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        self.manual_seed = self.manual_seed_all = torch.default_generator.manual_seed
        self.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchWithoutCuda(types.ModuleType):
    """The torch that Megatron sees: factories create on the CPU where device="cuda"."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CudaOfTheCpu()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*arguments: Any, **keywords: Any) -> Any:
        if _names_cuda(keywords.get("device")):
            keywords["device"] = CPU
        keywords.pop("pin_memory", None)
        return factory(*arguments, **keywords)

    return create


def _names_cuda(place: object) -> bool:
    if isinstance(place, torch.device):
        return place.type == "cuda"
    return str(place).startswith("cuda") or (isinstance(place, int) and not isinstance(place, bool))


def _accept_cuda_on_tensors() -> None:
    """Let tensors and modules be "moved" to CUDA; without CUDA these calls could only raise."""
    to = torch.Tensor.to

    @functools.wraps(to)
    def move(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if arguments and isinstance(arguments[0], str) and arguments[0].startswith("cuda"):
            arguments = (CPU, *arguments[1:])
        if _names_cuda(keywords.get("device")):
            keywords["device"] = CPU
        return to(self, *arguments, **keywords)

    kind = torch.Tensor.type

    @functools.wraps(kind)
    def cuda_kind(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        # Megatron's optimizers recognise precisions by the type names of CUDA tensors.
        answer = kind(self, *arguments, **keywords)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = cuda_kind  # type: ignore[method-assign, assignment]
    torch.Tensor.to = move  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _patch_megatron() -> None:
    """Replace the pieces of megatron-core 0.19.2 that assume CUDA in their own code."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    # Both reach into torch.cuda's generators, which a CPU build does not have.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    # gloo gathers and scatters only equal shares; Megatron's token dispatcher has unequal ones
    # where expert-tensor-parallel ranks hold different numbers of tokens.
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings._gather_along_first_dim = _gather_unequal(mappings._gather_along_first_dim)
    scatter = _scatter_unequal(mappings._reduce_scatter_along_first_dim)
    mappings._reduce_scatter_along_first_dim = scatter

    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    # The original returns a tensor that is not on CUDA unchanged, but callers need lists.
    moe_utils.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = _as_splits

    rotary: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    rotary._apply_rotary_pos_emb_thd = _rotate_at_once(rotary, rotary._apply_rotary_pos_emb_thd)


def _rotate_at_once(rotary: Any, by_sequence: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Rotate a packed row in one product of equal bits.

    megatron-core 0.19.2 rotates one sequence after the other and copies each into the row
    (rope_utils.py, "CASE 2"); of short sequences, a step of training took twice as long. On GPUs
    TransformerEngine's kernel rotates.
    """

    def rotated(
        row: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        if len(freqs) == int(cu_seqlens[-1]):  # the positions of the row, not of a sequence
            return by_sequence(row, cu_seqlens, freqs, **options)
        group = options.pop("cp_group")
        sequences = row.detach().split((cu_seqlens.diff() // group.size()).tolist())
        of_rank = functools.partial(
            rotary._get_thd_freqs_on_this_cp_rank, group.rank(), group.size(), freqs=freqs
        )
        at_once = torch.cat([of_rank(sequence) for sequence in sequences])
        return rotary._apply_rotary_pos_emb_bshd(row.unsqueeze(1), at_once, **options).squeeze(1)

    return rotated


def _gather_unequal(equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def gather(
        shard: Any, group: Any, output_split_sizes: Any = None, *options: Any
    ) -> torch.Tensor:
        sizes = output_split_sizes
        if sizes is None or group.size() == 1:
            return equal(shard, group, sizes, *options)
        shards = [shard.new_empty(size, *shard.shape[1:]) for size in sizes]
        shards[group.rank()] = shard.contiguous()
        for rank, whole in enumerate(shards):
            dist.broadcast(whole, group=group, group_src=rank)
        return torch.cat(shards)

    return gather


def _scatter_unequal(equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def scatter(
        whole: Any, group: Any, input_split_sizes: Any = None, *options: Any
    ) -> torch.Tensor:
        sizes = input_split_sizes
        if sizes is None or group.size() == 1:
            return equal(whole, group, sizes, *options)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(list(sizes))[group.rank()].contiguous()

    return scatter


def _as_splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _admit_replicated_projections() -> None:
    """Let latent attention's down-projections be modelopt's Linear without TransformerEngine.

    The module compares their class with a name that it imports with TransformerEngine alone
    (megatron-core 0.19.2, transformer/multi_latent_attention.py, `if HAVE_TE`).
    """
    modelopt: Any = importlib.import_module("megatron.core.post_training.modelopt.layers")
    latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    latent.Linear = modelopt.Linear


def _count_adam_steps_by_group() -> None:
    """Use our AdamW where neither TransformerEngine nor apex is installed.

    megatron-core would use torch's, which counts steps per parameter. Its fully reshardable format
    drops these counts when saving and requires them when loading (KeyError: 'step'), and a rank
    that owns no parameter of a group has no count to save. A count per group avoids both.
    """
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = GroupStepAdam, False
        distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


class GroupStepAdam(torch.optim.AdamW):
    """torch's AdamW, bit for bit, with `step` in the parameter group instead of in every state.

    Empty groups have it too, so that all ranks save the same keys.
    """

    def __init__(self, params: Iterable[Any], *, adam_w_mode: bool = True, **options: Any) -> None:
        """Decouple the weight decay from the gradient if `adam_w_mode`, as apex does."""
        super().__init__(params, **options)
        self.adam_w_mode = adam_w_mode
        for group in self.param_groups:
            group["step"] = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; skip torch's Adam, which requires a step for every parameter."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is ignored."""
        for group in self.param_groups:
            done = group["step"]
            group["step"] = done + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][name] = torch.zeros_like(parameter)
            states = [self.state[parameter] for parameter in parameters]
            adam(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                max_exp_avg_sqs=[],
                state_steps=[torch.tensor(float(done)) for _ in parameters],
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                maximize=False,
                **{name: group[name] for name in ("lr", "weight_decay", "eps")},
            )
