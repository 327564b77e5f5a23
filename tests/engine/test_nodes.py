"""An engine over two nodes: one process on each, as a Slurm step would start them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.settings import EngineJob, LayoutSettings
from pipeline.launch.placement import ForkServers
from pipeline.launch.processes import Child
from tests.awaiting import PATIENCE_SECONDS
from tests.engine import refit_cases
from tests.engine.engine_process import PROGRAM, START_SECONDS
from tests.engine.engine_settings import ENGINE, MODEL
from tests.ranks import On

SETTINGS = ENGINE.model_copy(update={"tensor": 2, "check_refit": True})
LAYOUT = LayoutSettings()


@pytest.fixture
def nodes(fork_servers: ForkServers, tmp_path: Path) -> Iterator[tuple[Child, Child]]:
    """The processes of both nodes of a ready engine."""
    address = tmp_path / "address.json"
    job = EngineJob(model=MODEL, engine=SETTINGS, index=0, address=address, seed=0, nodes=2)
    (tmp_path / "engine.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", PROGRAM, str(tmp_path / "engine.json")]

    def start(rank: int) -> Child:
        environment = {"SLURM_PROCID": str(rank)}
        log, fork = tmp_path / f"engine.{rank}.log", fork_servers.of(command)
        return Child(f"node {rank}", command, log, environment, request_fork=fork)

    started = start(0), start(1)
    deadline = time.monotonic() + START_SECONDS
    try:
        while not address.exists():
            assert all(each.status() is None for each in started), tmp_path
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield started
    finally:
        for each in started:
            each.send(signal.SIGKILL)
            each.reap()


def test_both_nodes_have_the_policy_bit_for_bit_and_end_with_their_workers(
    on: On, nodes: tuple[Child, Child], tmp_path: Path
) -> None:
    """The loaders' slices are checked on each node at the start, fingerprints after each refit."""
    described = (MODEL, LAYOUT, SETTINGS)
    arguments = (tmp_path / "address.json",), *(each.model_dump_json() for each in described)
    found = on(LAYOUT, refit_cases.refit, *arguments, [1, 2])[0]
    assert not found["wrong"]
    assert found["mismatch"] < 1e-4
    assert found["refit_bytes"] == found["bound"]
    follower = nodes[1]
    [worker] = set(re.findall(r"\(Worker pid=(\d+)\)", follower.log.read_text()))
    os.kill(int(worker), signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (status := follower.status()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert status == 1  # not 0: Slurm ends a step at its first bad exit
