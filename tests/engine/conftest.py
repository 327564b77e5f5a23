"""One real vLLM engine, and one policy to refit it from, for the whole session."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_settings import ENGINE, MODEL


@pytest.fixture(scope="session")
def engine_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The address file of a running engine without weights."""
    directory = tmp_path_factory.mktemp("engine")
    address = directory / "address.json"
    job = {
        "model": MODEL.model_dump(mode="json"),
        "engine": ENGINE.model_dump(mode="json"),
        "address": str(address),
        "seed": 0,
    }
    (directory / "engine.json").write_text(json.dumps(job))
    with (directory / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "parallel.rollout.server", str(directory / "engine.json")],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    yield address
    process.kill()
    process.wait()
