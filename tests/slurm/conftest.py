"""`braid` on the Slurm of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.on_slurm import HERE, Braid
from tests.virtual_cluster import Cluster, brought_up


@pytest.fixture
def braid(cluster: Cluster, tmp_path: Path) -> Iterator[Braid]:
    yield from _braid(cluster, tmp_path)


@pytest.fixture(scope="module")
def gpu_cluster() -> Iterator[Cluster]:
    """Three virtual nodes with four fake GPUs each."""
    with brought_up(gpus=4) as found:
        yield found


@pytest.fixture
def gpu_braid(gpu_cluster: Cluster, tmp_path: Path) -> Iterator[Braid]:
    yield from _braid(gpu_cluster, tmp_path)


def _braid(cluster: Cluster, tmp_path: Path) -> Iterator[Braid]:
    program = tmp_path / "bin" / "braid"
    program.parent.mkdir()
    script = HERE / "braid_with_slow_stages.py"
    program.write_text(f'#!/bin/bash\nexec {sys.executable} {script} "$@"\n')
    program.chmod(0o755)
    yield Braid(cluster, tmp_path, program)
    cluster.call("scancel", "--user=root")
    cluster.wait_until(lambda: not cluster.call("squeue", "--noheader"))
