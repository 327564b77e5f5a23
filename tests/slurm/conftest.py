"""`braid` on the Slurm of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.on_slurm import HERE, Braid
from tests.virtual_cluster import Cluster


@pytest.fixture
def braid(cluster: Cluster, tmp_path: Path) -> Iterator[Braid]:
    program = tmp_path / "bin" / "braid"
    program.parent.mkdir()
    script = HERE / "braid_with_slow_stages.py"
    program.write_text(f'#!/bin/bash\nexec {sys.executable} {script} "$@"\n')
    program.chmod(0o755)
    yield Braid(cluster, tmp_path, program)
    cluster.call("scancel", "--user=root")
    cluster.wait_until(lambda: not cluster.call("squeue", "--noheader"))
