"""No tensor of a model's steps is made on the CPU: they run on a device that is not the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from parallel.settings import LayoutSettings
from tests.layouts.fake_gpu import results
from tests.ranks import PATIENCE_SECONDS, On
from tests.runs import REPOSITORY


def fake_gpu(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, since the fake device cannot be taken back."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        f"from tests.layouts.fake_gpu import *\n{code}",
    ]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_a_step_on_a_device_equals_one_on_the_cpu(on: On) -> None:
    answer = fake_gpu("main()")
    assert answer.returncode == 0, answer.stderr[-3000:]
    [expected] = on(LayoutSettings(), results)
    assert json.loads(answer.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_tensor_of_the_cpu_is_found() -> None:
    """The first GPU run: Megatron makes a tensor on the device of a loss, which was the CPU."""
    answer = fake_gpu(
        "pretend()\n"
        "with FakeGpu():\n"
        "    loss, scale = torch.zeros(()), torch.ones(1, device=GPU)\n"
        "    assert (scale * loss).device == scale.device  # a number may be on the CPU\n"
        "    torch.ones(1, device=loss.device) * scale\n"
    )
    assert answer.returncode == 1
    assert "found at least two devices, gpu:0 and cpu" in answer.stderr
