"""The imports of an engine, for the fork server that engines are forked from; import only there."""

from __future__ import annotations

from importlib import import_module

from parallel.engine.platform import has_gpus

for name in (
    "parallel.engine.server",
    "parallel.hugging_face.config",
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "parallel.engine.refit_extension",
):
    import_module(name)

if not has_gpus():
    from parallel.cpu import vllm_runner

    # It scans the names of all modules, twice: .6 s of processor time, more than the rest of a
    # forked engine's start.
    vllm_runner.provide()
    for name in (
        "vllm.v1.worker.cpu.model_runner",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        "vllm.model_executor.layers.quantization.online.base",
    ):
        import_module(name)
