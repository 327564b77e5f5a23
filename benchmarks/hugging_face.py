"""What a Hugging Face checkpoint costs in memory, in and out, in times of its largest tensor.

    python benchmarks/hugging_face.py [--layers 24]

One rank and a random Qwen3-MoE of some 700 MiB. With --layers, files of that many layers of
Qwen3-30B-A3B instead, without a model beside them (24 layers: 30 GB): they are written and verified
as an export does, and read as the 8 ranks of an import do, one rank on each core at a time,
beside the disk's own speed with one plain file of the same size. All are flushed to the disk, and
read when the page cache has none of them. The memory is the kernel's own high-water mark of
what is resident (VmHWM), so that nothing between two samples is missed and pages of files that are
mapped count too. From it is taken what was resident before, the model's own weights among it.
Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
        from stages.kinds.export.work import export

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


def measure_files(layers: int) -> dict[str, Any]:
    """Return the speed of writing, verifying and reading a large checkpoint, and of the disk."""
    import torch
    import yaml

    from parallel.hugging_face.config import expected_tensors, hugging_face_config
    from parallel.hugging_face.files import WeightFiles
    from parallel.hugging_face.writer import verify, write
    from parallel.weights.holdings import held

    published = Path(__file__).parent.parent / "configs/models/qwen3-30b-a3b.yaml"
    settings = yaml.safe_load(published.read_text()) | {"layers": layers}
    model, layout = ModelSettings.model_validate(settings), LayoutSettings(ranks=8, expert=8)
    expected = expected_tensors(hugging_face_config(model))
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in expected.values()]
    noise = torch.randn(max(sizes) // 2).bfloat16()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in expected.items():
            yield name, noise[: math.prod(spec.shape)].view(spec.shape)

    def read(rank: int) -> None:
        for piece in held(model, layout, rank):
            files.read(piece.tensor, piece.box).clone()  # a rank copies it into its model

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        plain = folder / "plain"
        found["disk write"] = rate(lambda: _write_plain(plain, sum(sizes)), sizes)
        found["disk read"] = rate(lambda: _read_plain(plain), sizes)
        plain.unlink()
        digests: dict[str, str] = {}
        found["write"] = rate(lambda: digests.update(write(folder, expected, stream())), sizes)
        found["verify"] = rate(lambda: verify(folder, expected, digests), sizes)
        files = WeightFiles(folder)
        for path in folder.glob("*.safetensors"):
            _drop(path)
        with ThreadPoolExecutor(os.cpu_count()) as ranks:
            found["read by 8 ranks"] = rate(lambda: list(ranks.map(read, range(8))), sizes)
    return {**measured(), "gibibytes": round(sum(sizes) / 2**30, 1), **found}


def cost(work: Callable[[], object], largest: int) -> dict[str, float]:
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


def rate(work: Callable[[], object], sizes: list[int]) -> dict[str, float]:
    """Return the `cost` of some work on all tensors, with its speed."""
    found = cost(work, max(sizes))
    return found | {"mebibytes_per_second": round(sum(sizes) / MEBIBYTE / found["seconds"])}


def _write_plain(path: Path, size: int) -> None:
    block = os.urandom(16 * MEBIBYTE)
    with path.open("wb") as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    _drop(path)


def _read_plain(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        block = bytearray(16 * MEBIBYTE)
        while file.readinto(block):
            pass


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="of Qwen3-30B-A3B, files alone")
    layers = parser.parse_args().layers
    print(json.dumps(measure() if layers is None else measure_files(layers), indent=1))
