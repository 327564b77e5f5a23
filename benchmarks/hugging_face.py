"""What a Hugging Face checkpoint costs in memory, in and out, in times of its largest tensor.

    python benchmarks/hugging_face.py

One rank and a random Qwen3-MoE of some 700 MiB. The memory is the kernel's own high-water mark of
what is resident (VmHWM), so that nothing between two samples is missed and pages of files that are
mapped count too. From it is taken what was resident before, the model's own weights among it.
Prints JSON.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import measured

from parallel.settings import LayoutSettings, ModelSettings

MODEL = ModelSettings(
    vocabulary_size=16384,
    hidden_size=1024,
    layers=3,
    attention_heads=8,
    key_value_heads=4,
    head_dim=128,
    experts=8,
    experts_per_token=2,
    expert_hidden_size=2048,
)
MEBIBYTE = 1 << 20


def measure(model: ModelSettings = MODEL) -> dict[str, Any]:
    """Seconds, and peaks beside the model's weights, of an export with its verification and of an
    import with its checks."""
    with alone(), tempfile.TemporaryDirectory() as directory:
        from parallel.hugging_face.weights import load_weights
        from parallel.model.policy import Policy
        from stages.export import export

        policy = Policy(model, LayoutSettings())
        policy.start_fresh(seed=0)
        sizes = [tensor.nbytes for _, tensor in policy.weights()]
        folder, shard = Path(directory) / "model", max(sizes)
        exported = cost(lambda: export(policy, folder, shard), max(sizes))
        imported = cost(
            lambda: load_weights(model, policy.bridge, policy.chunks, folder), max(sizes)
        )
        files = len(list(folder.glob("*.safetensors")))
    return {
        **measured(),
        "model_mebibytes": round(sum(sizes) / MEBIBYTE),
        "largest_tensor_mebibytes": max(sizes) // MEBIBYTE,
        "files": files,
        "export": exported,
        "import": imported,
    }


def cost(work: Callable[[], None], largest: int) -> dict[str, float]:
    """Seconds of some work and the memory it took, which is given back in part at most."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    begun = time.monotonic()
    work()
    peak = resident("VmHWM") - before
    return {
        "seconds": round(time.monotonic() - begun, 2),
        "peak_mebibytes": round(peak / MEBIBYTE),
        "times_largest_tensor": round(peak / largest, 2),
    }


def resident(which: str) -> int:
    """Bytes of this process in memory now (VmRSS), or at most since the mark was set (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"this system does not tell {which}")


@contextmanager
def alone() -> Iterator[None]:
    """The process groups of a job of one rank."""
    from parallel.distributed import process_groups

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with process_groups(LayoutSettings(), seed=0):
        yield


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
