"""vLLM's configuration on each kind of device: one table, of two columns and what both share.

On a CPU a response's bits must not depend on its neighbors or on a compiler; on a GPU speed counts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from parallel.engine.lockstep import member_environment
from parallel.engine.nodes import meeting_point, node_rank
from parallel.engine.platform import has_gpus, process_environment, unsupported
from parallel.errors import UserError
from parallel.estimates.engine_memory import BATCHED_TOKENS, CACHE_BLOCK, cache_bytes, engine_memory
from parallel.families import traits
from parallel.machine.determinism import engine_environment
from parallel.machine.gpus import Gpu, visible_gpus
from parallel.machine.network import address_of
from parallel.settings import EngineJob, ModelSettings

LATENT_CACHE_BLOCK = 16  # the only one of vLLM 0.32's CPU_MLA
# vLLM 0.32's rotary kernel for CPUs (csrc/cpu/pos_encoding.cpp) takes the stride of a head for that
# of a token where queries are [tokens, heads, width], as latent attention's are. torch rotates them
# until that kernel reads both strides, as vllm-project/vllm#18046 made the one for GPUs do.
TORCH_ROTATES = {"custom_ops": ["-rotary_embedding"]}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PRECISE_HEAD = {"head_dtype": "float32"}  # of the Hugging Face configuration, as vLLM reads it


def engine_arguments(job: EngineJob, directory: str, *, cuda: bool) -> dict[str, Any]:
    """Return the keywords of vLLM's EngineArgs for the model configuration in `directory`.

    Raises:
        UserError: the device cannot do what the job's settings ask for.
    """
    engine = job.engine
    shared = {
        "model": directory,
        "load_format": "dummy",  # until the first refit
        "skip_tokenizer_init": True,
        "dtype": DTYPES[job.model.precision],
        "tensor_parallel_size": engine.tensor,
        "enable_expert_parallel": engine.expert_parallel,
        "distributed_executor_backend": "uni" if engine.tensor == 1 else "mp",
        "max_model_len": engine.max_model_tokens,
        "max_num_seqs": engine.max_sequences,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "enable_return_routed_experts": True,
        "return_sampling_mask": job.sampling_mask,
        "enable_prefix_caching": True,
        "worker_extension_cls": "parallel.engine.refit_extension.RefitExtension",
        "seed": job.seed,
    }
    if job.model.precise_head:
        shared["hf_overrides"] = PRECISE_HEAD
    return shared | _nodes(job) | (_on_cuda(job) if cuda else _on_cpu(job))


def _nodes(job: EngineJob) -> dict[str, Any]:
    if job.nodes == 1:
        return {}
    address, port = meeting_point(job)
    rank = node_rank(job)
    return {"nnodes": job.nodes, "node_rank": rank, "master_addr": address, "master_port": port}


def _on_cpu(job: EngineJob) -> dict[str, Any]:
    if job.engine.weights == "fp8":
        raise UserError(
            "engine.weights: fp8 needs a GPU, and this engine runs on a CPU; use weights: model"
        )
    if job.engine.expert_parallel:  # its kernel of experts would read past the rank's own
        raise UserError(
            "engine.expert_parallel needs a GPU, and this engine runs on a CPU; set it to false"
        )
    # vLLM would only miss these kernels once it samples.
    family = traits(job.model)
    late = family.delta_nets or family.latent_attention
    if late and (why := unsupported(job.model)) is not None:
        raise UserError(why)
    return {
        "enforce_eager": True,
        "async_scheduling": False,
        # Where a prompt is cut would depend on its neighbors.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(job.engine.max_model_tokens, BATCHED_TOKENS),
        "enable_prefix_caching": (cached := family.prefix_caching_on_cpu),
        "enable_return_routed_experts": cached,  # else `_prepare_cpu` does
        "kv_cache_memory_bytes": cache_bytes(job.model, job.engine),
        **_attention_on_cpu(job.model),
    }


def _attention_on_cpu(model: ModelSettings) -> dict[str, Any]:
    """Return the keywords of vLLM's attention on a CPU, with the tokens of a block of its cache."""
    if not traits(model).latent_attention:
        return {"block_size": CACHE_BLOCK}
    return {
        # vLLM prefers AMX_MLA where a CPU has AMX: it takes bf16 alone, and gives other bits.
        "attention_backend": "CPU_MLA",
        "block_size": LATENT_CACHE_BLOCK,
        "compilation_config": TORCH_ROTATES,
    }


def _on_cuda(job: EngineJob) -> dict[str, Any]:
    engine = job.engine
    return {
        # vLLM's default compilation: piecewise, and whole decode steps as CUDA graphs. They refer
        # to the weights by address, and a refit copies into the same storage.
        "enforce_eager": False,
        # The next step is scheduled while one runs; a refit first drains them (Core.drain).
        "async_scheduling": True,
        # Model Runner V2 derives a token's random numbers from its seed and position, so a partial
        # prefill rewinds nothing.
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": max(engine.max_sequences, BATCHED_TOKENS),
        "block_size": None,  # the attention backend's own: 16, or 64 for latent attention
        # FlashInfer's fused experts, which vLLM prefers on Blackwell, choose the experts inside one
        # kernel. vLLM 0.32 returns their routes after a refit too (`RoutedExpertsSink`); no
        # Blackwell has shown here that a refit fits the layout of their weights.
        "moe_backend": "triton",
        # Online quantization: the wire, the loaders and their checks see model.precision.
        # Scales per output channel and token need no size to be a multiple of 128.
        "quantization": "fp8_per_channel" if engine.weights == "fp8" else None,
        "enable_sleep_mode": engine.sleeps_on("cuda"),
        **_cuda_memory(job),
    }


def _cuda_memory(job: EngineJob) -> dict[str, Any]:
    """Return vLLM's limits on the memory of each of the engine's GPUs.

    vLLM refuses to start where less than `gpu_memory_utilization` of a GPU is free.
    """
    if not (gpus := own_gpus(job)):
        raise UserError("the engine's process sees no GPU; check CUDA_VISIBLE_DEVICES")
    total = min(gpu.total_bytes for gpu in gpus)
    free = min(gpu.free_bytes for gpu in gpus)
    memory = engine_memory(job.model, job.engine, total, free, job.gpu_memory_bytes)
    return {
        "gpu_memory_utilization": memory.gpu_memory_utilization,
        "kv_cache_memory_bytes": memory.kv_cache_memory_bytes,
    }


def own_gpus(job: EngineJob) -> list[Gpu]:
    """Return the GPUs that the engine uses on this node: the first that its process sees.

    It sees the node's others only to map the trainer's memory on them (`parallel.machine.slots`).
    """
    return visible_gpus()[: job.engine.tensor // job.nodes]


@contextmanager
def configuration(job: EngineJob) -> Iterator[Any]:
    """Yield vLLM's configuration; the model's is in a directory that lasts as long."""
    os.environ.update(process_environment(has_gpus()))  # for an engine that no launcher started
    os.environ.update(engine_environment(job.deterministic))
    os.environ.update(member_environment(job))
    if job.nodes > 1:
        os.environ["VLLM_HOST_IP"] = address_of(job.interface)  # of vLLM's message queues
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    from parallel.cpu import vllm_delta_net, vllm_runner, vllm_vision
    from parallel.hugging_face.config import hugging_face_config

    with tempfile.TemporaryDirectory(prefix="braid-engine-") as directory:
        hugging_face_config(job.model).save_pretrained(directory)
        cuda = current_platform.is_cuda()
        if not cuda:
            vllm_runner.provide()
            if traits(job.model).beside_vision:
                vllm_vision.provide()
            if traits(job.model).delta_nets:
                vllm_delta_net.provide()
        arguments = engine_arguments(job, directory, cuda=cuda)
        config = EngineArgs(**arguments).create_engine_config()
        _prepare_cpu(config, job)
        yield config


def _prepare_cpu(config: Any, job: EngineJob) -> None:
    """On a CPU, use the fused norms, fork vLLM's processes, and bind each rank to its cores.

    vLLM would spawn each process, which then takes 15 s for its imports.
    """
    if config.device_config.device_type != "cpu":
        return
    from parallel.cpu import vllm_exchange
    from parallel.cpu import vllm_kernels as cpu_kernels

    cpu_kernels.prefer(config.kernel_config)
    # vLLM wants prefix caching for routes, since their blocks have the cache's keys. Without keys
    # it holds a request's blocks until the request ends.
    config.aux_output_config.enable_return_routed_experts = True
    if job.engine.data > 1:
        vllm_exchange.provide()  # workers are forked from this process
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if (ranks := job.engine.tensor // job.nodes) > 1:
        cores = sorted(os.sched_getaffinity(0))
        shares = np.array_split(cores, ranks)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, share if len(share) else cores[:1])) for share in shares
        )
