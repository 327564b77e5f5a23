"""The process of an engine on each of its nodes but the first: vLLM's workers, and no server.

The first node's process schedules, and its messages drive all workers. Any process that
ends badly ends the engine's Slurm step, and the launcher restarts the whole engine.
"""

from __future__ import annotations

from parallel.engine.arguments import configuration
from parallel.settings import EngineJob


class LostWorkers(RuntimeError):
    """The workers of this node have ended, by themselves or with the first node's process."""


def follow(job: EngineJob) -> None:
    """Run this node's workers until one ends.

    Raises:
        LostWorkers: always in the end; a clean end would leave the step's other tasks running.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    with configuration(job) as config:
        # As `vllm serve --headless` does where its node is not the first.
        executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    raise LostWorkers(f"the workers of engine {job.index} on this node have ended")
