"""vLLM's configuration for a GPU, made without one: its own checks of our arguments.

    python -m tests.engine.cuda_platform CAPABILITY < jobs.jsonl

For each `EngineJob` on standard input one line of JSON is printed. vLLM's CUDA platform is real but
for what it asks the driver and the compiled libraries, which the CPU build lacks.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
from types import ModuleType
from typing import Any

from parallel.engine import arguments
from parallel.engine.lockstep import member_environment
from parallel.engine.platform import COMMON
from parallel.hugging_face.config import hugging_face_config
from parallel.machine.gpus import Gpu
from parallel.settings import EngineJob

GIB = 1 << 30
LIBRARIES = "_C_stable_libtorch", "_moe_C_stable_libtorch", "_qutlass_C", "vllm_flash_attn"


class Uncompiled(ModuleType):
    """A compiled library that is not there; its functions are never called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def pretend(capability: tuple[int, int]) -> None:
    """Make vLLM's current platform a GPU of this compute capability."""
    for name in LIBRARIES:
        sys.modules[f"vllm.{name}"] = Uncompiled(f"vllm.{name}")
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    interface: Any = importlib.import_module("vllm.platforms.interface")
    answers = {
        "get_device_capability": interface.DeviceCapability(*capability),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_total_memory": 80 * GIB,
        "get_device_uuid": "GPU-0",
        "device_count": 8,
        "get_cuda_runtime_major": 13,
        "num_compute_units": 132,
        "is_fully_connected": True,
        "is_cumem_allocator_available": True,  # a compiled library of the GPU wheel
    }
    methods = {
        name: classmethod(lambda *_, answer=answer, **__: answer)
        for name, answer in answers.items()
    }
    platforms._current_platform = type("FakeGpu", (cuda.NonNvmlCudaPlatform,), methods)()
    operations = importlib.import_module("vllm._custom_ops")
    for name in [each for each in vars(operations) if re.match(r"cutlass_.*support", each)]:
        setattr(operations, name, lambda *_: True)
    importlib.import_module("vllm.config.vllm").HAS_TRITON = True  # type: ignore[attr-defined]


def configured(job: EngineJob) -> dict[str, Any]:
    """Return what vLLM makes of the job's arguments."""
    from vllm import EngineArgs

    with tempfile.TemporaryDirectory() as directory:
        hugging_face_config(job.model).save_pretrained(directory)
        chosen = arguments.engine_arguments(job, directory, cuda=True)
        os.environ.update(member_environment(job))
        config = EngineArgs(**chosen).create_engine_config()
    compilation, scheduler = config.compilation_config, config.scheduler_config
    return {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": scheduler.async_scheduling,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "batched_tokens": scheduler.max_num_batched_tokens,
        "compilation": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "captured": bool(compilation.cudagraph_capture_sizes),
        "block_size": config.cache_config.block_size,
        "experts": config.kernel_config.moe_backend,
        "expert_parallel": config.parallel_config.enable_expert_parallel,
        "executor": config.parallel_config.distributed_executor_backend,
        "placement": config.parallel_config.expert_placement_strategy,
        "quantization": type(config.quant_config).__name__ if config.quant_config else None,
        "mask": config.model_config.return_sampling_mask,
        "memory": config.cache_config.gpu_memory_utilization,
        "cache": config.cache_config.kv_cache_memory_bytes,
        "sleeps": config.model_config.enable_sleep_mode,
        "routes": config.aux_output_config.enable_return_routed_experts,
    } | (_member(config.parallel_config) if job.engine.data > 1 else {})


def _member(parallel: Any) -> dict[str, Any]:
    return {
        "members": parallel.data_parallel_size,
        "member": parallel.data_parallel_rank,
        "first_gpu": parallel.data_parallel_rank_local,
        "port": parallel.data_parallel_master_port,
    }


def main() -> None:
    """Print vLLM's configuration for each job, or its refusal."""
    os.environ.update(COMMON)
    major, minor = map(int, sys.argv[1].split("."))
    pretend((major, minor))
    gpu = Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 * GIB, 70 * GIB, "580.0", sys.argv[1])
    arguments.visible_gpus = lambda: [gpu] * 4  # type: ignore[assignment]
    for line in sys.stdin:
        print("configured", json.dumps(configured(EngineJob.model_validate_json(line))))


if __name__ == "__main__":
    main()
