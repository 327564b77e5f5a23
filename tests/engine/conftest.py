"""Real vLLM engines, the first of which serves the whole session."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_settings import ENGINE, MODEL

from parallel.settings import ModelSettings


@pytest.fixture(scope="session")
def engine_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The address file of a running engine without weights."""
    with running_engine(MODEL, tmp_path_factory.mktemp("engine")) as address:
        yield address


@contextmanager
def running_engine(model: ModelSettings, directory: Path) -> Iterator[Path]:
    """The address file of an engine that runs as long as it is needed."""
    address = directory / "address.json"
    job = {
        "model": model.model_dump(mode="json"),
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
    try:
        yield address
    finally:
        process.kill()
        process.wait()
