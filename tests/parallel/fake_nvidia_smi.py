"""An nvidia-smi on PATH that prints what a test wants."""

from __future__ import annotations

from pathlib import Path

import pytest

GPU_LINES = "\n".join(
    f"{index}, GPU-{index:08x}, NVIDIA H100 80GB HBM3, 81559, {80000 - index}, 580.65.06, 9.0"
    for index in range(4)
)


def put_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, directory: Path, prints: str = GPU_LINES, status: int = 0
) -> None:
    """Put an nvidia-smi on PATH that prints these lines, beside a torch that is built for CUDA."""
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.setattr("parallel.machine.gpus.built_for_cpu", lambda: False)
