"""The extension of vLLM's worker that takes the trainer's weights in place, by vLLM's loaders.

In vLLM 0.32 `model.load_weights` fails on a loaded engine, whose weights are already repacked, and
`reload_weights` silently gives wrong experts on a CPU. Here one layerwise reload brackets the whole
refit, and layers are processed explicitly where vLLM would wait for weights that never come.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import msgspec
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from parallel.engine.expert_stacks import ExpertStack, expert_stacks
from parallel.engine.loaders import Copy, Unread, copy_nothing
from parallel.engine.wire import EnginePlace, Join, RankReport, Refit
from parallel.machine.device import gpu_ordinals, synchronize
from parallel.machine.forkserver import PR_SET_PDEATHSIG, prctl
from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.boxes import Box
from parallel.weights.executor import Inbox, add_fingerprints, fingerprint, wire_dtype
from parallel.weights.mapping import host_identity
from parallel.weights.names import bucket_of, loaded_tensors
from parallel.weights.needs import needed
from parallel.weights.planner import Bucket, EngineSizes, Hosts, Plan

# Rotary embeddings hold a cache and no weight of a checkpoint: of every weight sync vLLM warns
# "RotaryEmbedding: Failed to load weights".
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: record.args != ("RotaryEmbedding",)
)

SINKS = ".sinks"  # the end of their names

Landed = dict[tuple[str, Box], int]  # fingerprints of what loaders have written, by tensor and box


class RefitExtension:
    """Methods added to vLLM's worker, called on every tensor-parallel rank by `collective_rpc`."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def prepare(self, model: str) -> None:
        """Raise RuntimeError where vLLM's loaders copy other slices than a refit plans.

        Then the plan does not fit this vLLM or this model.
        """
        group = get_tp_group()
        self._tensor_rank = group.rank_in_group
        if group.world_size > 1:  # a single rank is the engine's own process
            # The kernel kills this worker with the engine. vLLM's workers check that the engine
            # lives only between calls: one that waits in a collective, for ranks that are gone,
            # would stay.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the engine: see its `main`
        if self.model_config.return_sampling_mask:
            empty_whole_masks()
        self._settings = ModelSettings.model_validate_json(model)
        taken = list(loaded_tensors(self._settings))
        self._shapes = {name: shape for name, shape, _ in taken}
        self._members = {name: member for name, _, member in taken if member is not None}
        self._stacks: dict[int, list[ExpertStack]] = {}
        for stack in expert_stacks(self.model_runner.model, self._shapes):
            self._stacks.setdefault(bucket_of(stack.names[0]), []).append(stack)
        self._inbox: Inbox | None = None
        self._device = next(self.model_runner.model.parameters()).device
        copied = set(self._copied())
        parallel = self.vllm_config.parallel_config
        whole, data = parallel.enable_expert_parallel, parallel.data_parallel_size
        rank = parallel.data_parallel_rank * group.world_size + group.rank_in_group
        ranks = data * group.world_size
        planned = set(needed(self._settings, ranks, rank, whole, data))
        if copied != planned:
            examples = [*sorted(copied - planned)[:2], *sorted(planned - copied)[:2]]
            raise RuntimeError(
                f"vLLM's loaders copy other slices than a refit would send, on rank {rank} of"
                f" {ranks}: {len(copied - planned)} unplanned and {len(planned - copied)} not"
                f" copied, such as {examples}"
            )

    def place(self) -> bytes:
        """Return this rank's encoded `EnginePlace`."""
        ordinals = gpu_ordinals()
        gpus = sorted(ordinals, key=lambda gpu: (ordinals[gpu] != self._device.index, gpu))
        return msgspec.msgpack.encode(EnginePlace(host_identity(), gpus))

    def join(self, message: bytes) -> None:
        """Plan this rank's part of a trainer's refits, and connect to the trainer's ranks."""
        join = msgspec.msgpack.decode(message, type=Join)
        self.leave()
        layout = LayoutSettings.model_validate(join.layout)
        rank = join.first_rank + self._tensor_rank
        hosts = Hosts(*map(tuple, join.hosts)) if join.hosts else None
        whole, data = join.expert_parallel, join.data
        fleet = EngineSizes(tuple(join.fleet), join.forwarding, whole, data, hosts)
        plan = Plan(self._settings, layout, fleet)
        self._inbox = Inbox(self._settings, layout, plan, rank, join.meetings, self._device)

    def leave(self) -> None:
        """Disconnect from the trainer, if there is one."""
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None

    def refit(self, message: bytes) -> bytes:
        """Take all weights, bucket by bucket; return an encoded `RankReport`."""
        request = msgspec.msgpack.decode(message, type=Refit)
        source = self._inbox
        if source is None:
            raise RuntimeError("the engine has joined no trainer")
        source.start()
        landed: Landed | None = {} if request.check else None
        try:
            if request.shared:
                source.map(request.shared)
            with self._bracket():
                for bucket in source.buckets:
                    self._load(bucket, source.take(bucket), landed)
            # Copies on a GPU are enqueued only: once this answers, the trainer changes its weights.
            synchronize(self._device)
            if request.release:
                source.unmap()
        except Exception:
            self.leave()  # so that ranks that wait for this one fail too
            raise
        summed: dict[int, int] = {}
        for (name, _), value in (landed or {}).items():
            summed[bucket_of(name)] = add_fingerprints(summed.get(bucket_of(name), 0), value)
        fingerprints = {str(key): str(value) for key, value in summed.items()}
        report = RankReport(source.received_bytes, source.staging_bytes, fingerprints)
        return msgspec.msgpack.encode(report)

    def clear_cache(self) -> None:
        """Zero the cache's memory, which may hold NaN after a sleep.

        vLLM's kernels multiply the unused end of a sequence's last block by probabilities of 0.
        """
        for module in self.model_runner.model.modules():
            caches = getattr(module, "kv_cache", None)
            for cache in [caches] if torch.is_tensor(caches) else caches or ():
                cache.zero_()

    def _load(
        self, bucket: Bucket, contents: dict[tuple[str, Box], torch.Tensor], landed: Landed | None
    ) -> None:
        """Load one bucket, which holds whole modules."""

        def copy(target: torch.Tensor, source: Unread) -> None:
            if target.is_meta:
                copy_nothing(target, source)
            elif source.numel():  # empty where this rank has only padding of the vocabulary
                name, box = source.tensor_name, source.box()
                view = source.as_seen(self._joined(name, box, contents))
                with torch._C.DisableTorchFunctionSubclass():
                    target.copy_(view)
                    if landed is not None:  # of a box that is written twice the last counts
                        dtype = wire_dtype(name, self._settings)
                        written = torch.empty(box[1], dtype=dtype, device=target.device)
                        source.as_seen(written).copy_(target)
                        for part_name, part_box, values in self._parts(name, box, written):
                            landed[part_name, part_box] = fingerprint(part_name, part_box, values)

        self._feed(bucket.key, bucket.tensors, copy)
        self._load_sinks(bucket.tensors, copy)
        for module in self.model_runner.model.modules():
            # vLLM counts a vocabulary's padding as missing, and would process the layer at the end.
            info = layerwise.get_layerwise_info(module)
            attention = layerwise.is_deferred_attention_layer(module)
            if info.can_load() and info.load_numel > 0 and not attention:
                layerwise._layerwise_process(module, info)

    def _feed(self, key: int, names: list[str], copy: Copy) -> None:
        """Have vLLM's loaders take the tensors of a bucket, experts stacked."""
        stacked: set[str] = set()
        for stack in self._stacks.get(key, ()):
            name = stack.names[0]
            stack.load(self._shapes[name], wire_dtype(name, self._settings), copy)
            stacked |= stack.everywhere
        single = ((name, self._unread(name, copy)) for name in names if name not in stacked)
        self.model_runner.model.load_weights(single)

    def _joined(
        self, name: str, box: Box, contents: dict[tuple[str, Box], torch.Tensor]
    ) -> torch.Tensor:
        """Return the contents of a box that a loader copies, from those of its parts."""
        if (member := self._members.get(name)) is None:
            return contents[name, box]
        [example, *_] = part_values = [contents[key] for key in member.boxes(box)]
        joined = torch.empty(box[1], dtype=example.dtype, device=example.device)
        for number, values in enumerate(part_values):
            member.stack.part(joined, number).copy_(values)
        return joined

    def _parts(
        self, name: str, box: Box, values: torch.Tensor
    ) -> list[tuple[str, Box, torch.Tensor]]:
        """Return the tensors of a refit in a box that a loader copies: names, boxes and views."""
        if (member := self._members.get(name)) is None:
            return [(name, box, values)]
        return [
            (part_name, part_box, member.stack.part(values, number))
            for number, (part_name, part_box) in enumerate(member.boxes(box))
        ]

    def _load_sinks(self, names: list[str], copy: Copy) -> None:
        """Load attention sinks by their parameters' loaders, which a reload waits for.

        vLLM 0.32's gpt_oss.py copies them itself, to the meta device while it reloads.
        """
        group = get_tp_group()
        for name in (tensor for tensor in names if tensor.endswith(SINKS)):
            path = name.removesuffix(SINKS).replace(".self_attn", ".attn")
            sinks = self.model_runner.model.get_submodule(path).sinks
            first_head, whole = group.rank_in_group * len(sinks), self._unread(name, copy)
            sinks.weight_loader(sinks, whole.narrow(0, first_head, len(sinks)))

    def _unread(self, name: str, copy: Copy) -> Unread:
        return Unread.of(name, self._shapes[name], wire_dtype(name, self._settings), copy)

    @contextmanager
    def _bracket(self) -> Iterator[None]:
        """Restore all layers to the form that loaders expect; at the end repack them."""
        model = self.model_runner.model
        kernels: list[tuple[Any, Any]] = []
        for module in model.modules() if self._device.type == "cpu" else ():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                # vLLM's CPU code repacks experts only when no kernel exists yet; with the old
                # kernel kept, it would read new experts in the old packing. Its GPU code is made
                # for a kept kernel: it copies new experts to where CUDA graphs read them.
                kernels.append((method, method.moe_kernel))
                method.moe_kernel = None
        with torch.no_grad(), self._default_device():
            layerwise.initialize_layerwise_reload(model)
            try:
                yield
            finally:  # also after an error, so that the next refit finds the usual state
                place_buffers(model)
                layerwise.finalize_layerwise_reload(model, self.model_config)
        for method, kernel in kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel

    def _default_device(self) -> AbstractContextManager[Any]:
        """Make the engine's device the default; on a CPU it is, and the mode would cost time."""
        return nullcontext() if self._device.type == "cpu" else torch.device(self._device)

    def _copied(self) -> list[tuple[str, Box]]:
        """Return the boxes that vLLM's loaders copy on this rank; the weights are unchanged."""
        model, boxes = self.model_runner.model, []

        def note(target: torch.Tensor, source: Unread) -> None:
            if source.numel():
                member, box = self._members.get(source.tensor_name), source.box()
                copied = [(source.tensor_name, box)] if member is None else member.boxes(box)
                boxes.extend(copied)
            copy_nothing(target, source)

        with torch.no_grad(), self._default_device():
            layerwise.initialize_layerwise_reload(model)
            try:
                for module in model.modules():
                    parameters: list[Any] = list(get_layer_tensors(module).values())
                    for parameter in parameters:
                        if getattr(parameter, "weight_loader", None) is not None:
                            parameter.weight_loader = layerwise._get_original_loader(parameter)
                for key, names in groupby(self._shapes, key=bucket_of):
                    self._feed(key, list(names), note)
            finally:
                for module in model.modules():
                    info = layerwise.get_layerwise_info(module)
                    if info.can_load():
                        layerwise._place_kernel_tensors(module, info)
                    info.reset()
                model._do_torchao_reload = model._original_do_torchao_reload
        return boxes


def place_buffers(model: torch.nn.Module) -> None:
    """Put back the layers that have buffers alone, as the table of rotary positions.

    No refit brings them. vLLM 0.32 would put them back too, but log that their weights failed to
    load (reload/layerwise.py counts buffers among them).
    """
    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        parameters = any(True for _ in module.parameters(recurse=False))
        if parameters or not info.can_load() or layerwise.is_deferred_attention_layer(module):
            continue
        if info.load_numel <= 0:
            layerwise._place_kernel_tensors(module, info)
            info.reset()


def empty_whole_masks() -> None:
    """Make the mask of a token that keeps the whole vocabulary empty, in this worker process.

    vLLM would unpack one of 150,000 ids for each token, and keep it until the response ends. It
    rejects such requests instead, greedy ones too (`Core` skips that check): the engine of a run
    with one domain of a top_k would serve no evaluation.
    """
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    original: Callable[[Any, Any], Any] = SamplingMaskTensors.tolists

    def bounded(masks: Any, num_sampled: Any = None) -> Any:
        counts = masks.counts.cpu()
        emptied = masks._replace(counts=counts.masked_fill(counts == masks.vocab_size, 0))
        return original(emptied, num_sampled)

    SamplingMaskTensors.tolists = bounded
