"""A real Slurm of several virtual nodes on this host, brought up once for all tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.awaiting import PATIENCE_SECONDS
from tests.runs import BRAID, REPOSITORY

SCRIPT = Path(__file__).parent / "slurm" / "cluster.sh"
INSTALL_SECONDS = 180


class Cluster:
    """The cluster, and what tests do to it."""

    def __init__(self, directory: Path, gpus: int = 0) -> None:
        self.directory = directory
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PORT": str(_free_port()),
            "GPUS": str(gpus),
        }

    def control(self, action: str, *arguments: str) -> None:
        """Run an action of `cluster.sh`."""
        command = [str(SCRIPT), action, str(self.directory), *arguments]
        # Nobody reads what daemons say: they would keep the pipe open.
        with (self.directory / "cluster.log").open("ab") as log:
            subprocess.run(
                command,
                check=True,
                env=self.environment,
                stdout=log,
                stderr=log,
                timeout=PATIENCE_SECONDS,
            )

    def call(self, *command: str) -> str:
        """Return the output of one of Slurm's commands."""
        found = subprocess.run(
            command,
            check=True,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        return found.stdout.strip()

    def braid(self, runs: Path, *arguments: str) -> str:
        """Return the output of `braid`.

        Raises:
            RuntimeError: it fails; with its error.
        """
        found = subprocess.run(
            [*BRAID, *arguments, "--runs-dir", str(runs)],
            env=self.environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        if found.returncode:
            raise RuntimeError(found.stderr)
        return found.stdout

    def state(self, job: str) -> str:
        """Return a job's state, which Slurm remembers for a while after its end."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait_until(self, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for what has to happen."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{condition}\n{self.call('squeue', '--array')}"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three virtual nodes with two partitions, of which `urgent` preempts."""
    with brought_up() as found:
        yield found


@contextmanager
def brought_up(gpus: int = 0) -> Iterator[Cluster]:
    """Yield a cluster whose nodes have fake GPUs; skip the test where none can be brought up."""
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
        found = Cluster(Path(folder), gpus)
        try:
            found.control("up")
        except subprocess.SubprocessError as error:
            log = (found.directory / "cluster.log").read_text()[-2000:]
            found.control("down")
            pytest.skip(f"Slurm does not start here: {error}\n{log}")
        yield found
        found.control("down")


def _free_port() -> int:
    """Return the first of 104 free ports in a row, as many as the cluster needs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(int(probe.getsockname()[1]), 65000)
