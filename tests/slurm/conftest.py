"""A real Slurm on this host, brought up once for all tests, and `braid` on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_slurm import HERE, SCRIPT, Braid, Cluster

INSTALL_SECONDS = 180


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three virtual nodes with two partitions, of which `urgent` preempts."""
    if os.geteuid():
        pytest.skip("a Slurm of one's own needs root: tests/slurm/cluster.sh")
    if not shutil.which("slurmctld"):
        try:
            subprocess.run(
                [str(SCRIPT), "install"], check=True, capture_output=True, timeout=INSTALL_SECONDS
            )
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"Slurm is not here and `tests/slurm/cluster.sh install` failed: {error}")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        found = Cluster(Path(folder))
        try:
            found.control("up")
        except subprocess.SubprocessError as error:
            log = (found.directory / "cluster.log").read_text()[-2000:]
            found.control("down")
            pytest.skip(f"Slurm does not start here: {error}\n{log}")
        yield found
        found.control("down")


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
