"""The environment variables and the CPU cores of engine processes; never imports torch.

The environment decides how vLLM runs, not what it computes: no compilation, no telemetry, no
downloads. It must be set when the process starts, since OpenMP reads its variables when torch is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from parallel.settings import EngineSettings

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


def process_environment() -> dict[str, str]:
    """Return the environment of the engine processes on this machine's devices."""
    return COMMON | ({} if GPU_FILE.exists() else ON_CPU)


@dataclass(frozen=True)
class Cores:
    """The CPU cores of all ranks together and of each engine; None means any."""

    ranks: list[int] | None
    engines: list[list[int] | None]


def share_out(engine: EngineSettings, cores: Sequence[int] | None = None) -> Cores:
    """Divide the CPU cores, by default all that this process may use, by `engine.placement`.

    own: each engine rank gets one of the last cores, and the trainer's ranks share the rest.
    shared: the ranks may use all cores, and each engine an equal part, if there are enough.

    Raises:
        UserError: no core is left for the trainer's ranks.
    """
    cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
    if engine.placement == "shared":
        part = len(cores) // engine.count
        if engine.count == 1 or part < engine.tensor:
            return Cores(None, [None] * engine.count)
        starts = range(0, engine.count * part, part)
        return Cores(None, [cores[start : start + part] for start in starts])
    first = len(cores) - engine.count * engine.tensor
    if first < 1:
        raise UserError(
            f"engine.placement: own needs {engine.count * engine.tensor + 1} CPU cores, one for "
            f"each of {engine.count} x {engine.tensor} engine ranks and at least one for the "
            f"trainer, {len(cores)} available; use fewer engines, or shared"
        )
    starts = range(first, len(cores), engine.tensor)
    return Cores(cores[:first], [cores[start : start + engine.tensor] for start in starts])
