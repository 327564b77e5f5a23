"""The environment of an engine's process. Never imports torch.

It says how vLLM is run, not what it computes: no compilation, no telemetry, no downloads. It has to
be there when the process starts, since OpenMP reads its part when torch is imported.
"""

from __future__ import annotations

PROCESS_ENVIRONMENT = {
    # Without multiprocessing vLLM's scheduler steps in the engine's own process. AsyncLLM's, in
    # another, cost half as much time again on two cores, since every token's log-probability
    # crosses on its own (docs/explanation/rollouts.md); one process less is also one less to lose.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    # OpenMP's threads spin while they wait for one another; beside another busy process that made
    # tiny layers ten times slower.
    "GOMP_SPINCOUNT": "1000",
}
