"""No tensor of a model's steps is made on the CPU: they run on a device that is not the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from parallel.settings import LayoutSettings
from tests.layouts.fake_gpu import results
from tests.ranks import PATIENCE_SECONDS, On
from tests.runs import REPOSITORY

# The fake device cannot be taken back, so that it has a process of its own. It prints the results,
# then the error of a tensor that is on the CPU.
PROGRAM = """
from tests.layouts.fake_gpu import *
main()
with FakeGpu():
    loss, scale = torch.zeros(()), torch.ones(1, device=GPU)
    assert (scale * loss).device == scale.device  # a number may be on the CPU
    try:
        torch.ones(1, device=loss.device) * scale
    except RuntimeError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """The results on the fake device, and the error of a tensor of the CPU."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()[-2:]]


def test_a_step_on_a_device_equals_one_on_the_cpu(on: On, answers: list[Any]) -> None:
    [expected] = on(LayoutSettings(), results)
    assert answers[0] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_tensor_of_the_cpu_is_found(answers: list[Any]) -> None:
    """The first GPU run: Megatron makes a tensor on the device of a loss, which was the CPU."""
    assert "found at least two devices, gpu:0 and cpu" in answers[1]
