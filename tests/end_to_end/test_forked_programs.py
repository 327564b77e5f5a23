"""Ranks and engines can be forked: their imports start no thread and touch no device."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from pipeline.forkserver import ForkServers
from pipeline.processes import Child


@pytest.mark.parametrize("module", ["stages.main", "parallel.rollout.server"])
def test_real_programs_can_be_forked(module: str, tmp_path: Path) -> None:
    """Their imports start no thread, and the program then reads the job that it was given."""
    command = [sys.executable, "-m", module, str(tmp_path / "job.json")]
    with ForkServers(tmp_path, wanted=True) as servers:
        server = servers.of(command)
        child = Child("child", command, tmp_path / "child.log", {}, None, server)
        deadline = time.monotonic() + 300
        while child.status() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        log = (tmp_path / "child.log").read_text()
        child.reap()
        assert server is not None
        assert server.state == "running", (tmp_path / f"{module}.log").read_text()
        assert "parallel/forkserver.py" in log  # in the traceback
        assert "job.json" in log
