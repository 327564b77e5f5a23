"""The environment variables of engine processes; never imports torch.

The environment decides how vLLM runs, not what it computes: no compilation, no telemetry, no
downloads. It must be set when the process starts, since OpenMP reads its variables when torch is
imported.
"""

from __future__ import annotations

PROCESS_ENVIRONMENT = {
    # Without multiprocessing vLLM's scheduler steps in the engine's process. AsyncLLM's, in another
    # process, took 1.5 times as long on two cores, since every token's log-probability is sent
    # separately (docs/explanation/rollouts.md).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    # OpenMP's threads spin while they wait for one another, which made tiny layers ten times slower
    # when another process was busy.
    "GOMP_SPINCOUNT": "1000",
}
