"""A refit between two processes of one device: this one's weights, mapped by another (CUDA IPC).

    python -m tests.gpu.refit FILE     # the other process; FILE has a `Handover`

The engine's side is `parallel.weights.executor.Inbox` with plain tensors, so vLLM is not needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from parallel.settings import LayoutSettings, ModelSettings
from parallel.weights.executor import Inbox, fingerprint
from parallel.weights.mapping import SharedMemory, share
from parallel.weights.needs import needed
from parallel.weights.planner import EngineSizes, Hosts, Plan
from tests.gpu.findings import Finding
from tests.gpu.losses import synchronize
from tests.gpu.models import TINY, qwen3_30b
from tests.gpu.part import Lane, one_rank

SECONDS = 180


class Handover(msgspec.Struct):
    """The model and the memory that the other process maps."""

    model: str
    shared: SharedMemory
    device: str


def refit(lane: Lane) -> list[Finding]:
    """Compare the fingerprint of every tensor on both sides, after a change of the weights."""
    from parallel.model.policy import Policy

    model = TINY if lane.small else qwen3_30b(2)
    with one_rank(), tempfile.TemporaryDirectory(prefix="braid-refit-") as directory:
        policy = Policy(model, LayoutSettings())
        named = policy.named_weights()
        shared = share(named)
        with torch.no_grad():  # after `share`: what is mapped must follow
            for number, tensor in enumerate(named.values()):
                draw = torch.Generator(tensor.device).manual_seed(number)
                tensor.normal_(0, 0.02, generator=draw)
        synchronize(lane.device)
        file = Path(directory) / "handover"
        handover = Handover(model.model_dump_json(), shared, lane.device)
        file.write_bytes(msgspec.msgpack.encode(handover))
        answer = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.gpu.refit", str(file)],
            stdout=subprocess.PIPE,
            timeout=SECONDS,
            text=True,
            check=True,
        )
        report = json.loads(answer.stdout.splitlines()[-1])
        whole = dict(policy.weights())
        wrong = [
            name
            for name, (offsets, sizes) in needed(model, 1, 0)
            if report["fingerprints"][name] != fingerprint(name, (offsets, sizes), whole[name])
        ]
    return [
        Finding(f"tensors that differ, of {len(report['fingerprints'])}", len(wrong), "", 0),
        Finding("bytes", report["bytes"] / 2**30, "GiB"),
        Finding("first refit", report["bytes"] / report["first"] / 1e9, "GB/s"),
        Finding("later refits", report["bytes"] / report["later"] / 1e9, "GB/s"),
    ]


def import_weights(file: Path) -> None:
    """Map the other process's weights, copy all of them three times, and print what was found."""
    handover = msgspec.msgpack.decode(file.read_bytes(), type=Handover)
    model, device = ModelSettings.model_validate_json(handover.model), handover.device
    layout = LayoutSettings()
    plan = Plan(model, layout, EngineSizes((1,), hosts=Hosts((0,), (0,))))
    inbox = Inbox(model, layout, plan, 0, [], torch.device(device))
    inbox.map({0: handover.shared})
    landed: dict[str, torch.Tensor] = {}
    seconds = []
    for _ in range(3):
        inbox.start()
        synchronize(device)
        started = time.perf_counter()
        for bucket in inbox.buckets:
            for (name, _), part in inbox.take(bucket).items():
                if name not in landed:
                    landed[name] = torch.empty_like(part, memory_format=torch.contiguous_format)
                landed[name].copy_(part)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    boxes = dict(needed(model, 1, 0))
    found = {name: fingerprint(name, boxes[name], each) for name, each in landed.items()}
    received = inbox.received_bytes
    inbox.close()
    report = {"fingerprints": found, "bytes": received, "first": seconds[0]}
    print(json.dumps({**report, "later": min(seconds[1:])}))


if __name__ == "__main__":
    import_weights(Path(sys.argv[1]))
