"""The environment variables of engine processes; never imports torch.

The environment decides how vLLM runs, not what it computes: no compilation, no telemetry, no
downloads. It must be set when the process starts, since OpenMP reads its variables when torch is
imported.
"""

from __future__ import annotations

from pathlib import Path

from parallel.machine.gpus import built_for_cpu

GPU_FILE = Path("/dev/nvidiactl")  # the driver's: torch is not imported here

COMMON = {
    # Without multiprocessing vLLM's scheduler steps in the engine's process. AsyncLLM's, in another
    # process, took 1.5 times as long on two cores, since every token's log-probability is sent
    # separately (docs/explanation/rollouts.md). On GPUs too: a refit reads the scheduler's requests
    # and drains its steps in flight, which takes no messages here. With tensor parallelism the
    # workers are separate processes either way.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # OpenMP's threads spin while they wait for one another, which made tiny layers ten times slower
    # when another process was busy.
    "GOMP_SPINCOUNT": "1000",
}
# On a GPU vLLM compiles the model and captures its steps as CUDA graphs.
ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}


def process_environment(on_gpus: bool) -> dict[str, str]:
    """Return the environment of engine processes on GPUs, or on a CPU."""
    return COMMON | ({} if on_gpus else ON_CPU)


def has_gpus() -> bool:
    """Return whether an engine that starts in this environment runs on GPUs; cheap."""
    return GPU_FILE.exists() and not built_for_cpu()
