"""Patches to the checkpointing of megatron-core 0.16.1, on every device.

It writes in a way that may hang, and reads in a way that runs what it reads.
"""

from __future__ import annotations

import functools
import importlib
import queue
from typing import Any

from parallel.checkpoint.reader import CheckpointReader, load_common, load_object

STRATEGIES = "megatron.core.dist_checkpointing.strategies"


@functools.cache
def patch_megatron() -> None:
    """Make megatron-core write in the calling thread, and read by `parallel.checkpoint.reader`."""
    _write_in_this_thread()
    tensors: Any = importlib.import_module(f"{STRATEGIES}.torch")
    common: Any = importlib.import_module(f"{STRATEGIES}.common")
    tensors._get_filesystem_reader = lambda directory, **_: CheckpointReader(directory)
    tensors.MCoreLoadPlanner.load_bytes = load_object
    common.TorchCommonLoadStrategy.load_common = lambda self, directory: load_common(directory)


def _write_in_this_thread() -> None:
    """Let megatron-core write a checkpoint's files in the thread that asks for it.

    Its filesystem_async.py forks a process for every file and waits for each without a limit, so
    that a killed one hangs its rank, and collects their answers in a manager process that takes
    seconds to start and outlives a killed rank.
    """
    module: Any = importlib.import_module(f"{STRATEGIES}.filesystem_async")
    writer = module.FileSystemWriterAsync

    def write(
        transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], answers: queue.Queue
    ) -> None:
        answer: dict[int, Any] = {}
        for index, bucket in enumerate(buckets):
            written: queue.Queue = queue.Queue()
            pending: queue.Queue = queue.Queue()
            pending.put(index)
            writer.write_preloaded_data(transforms, index, bucket, written, pending, True)
            _, answer[index] = written.get()
            if isinstance(answer[index], Exception):
                raise answer[index]
        answers.put(answer)

    writer.write_preloaded_data_multiproc = staticmethod(write)
    module._get_write_results_queue = queue.Queue  # one for each checkpoint
