"""The imports of an engine, for the fork server that engines are forked from; import only there."""

from __future__ import annotations

from importlib import import_module

for name in (
    "parallel.engine.server",
    "parallel.hugging_face.config",
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "parallel.engine.refit_extension",
):
    import_module(name)
