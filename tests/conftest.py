"""Fixtures for tests of several directories: ranks, reused by tests of one layout, and a Slurm."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from parallel.settings import LayoutSettings
from tests.chromium import browser as browser  # a fixture
from tests.ranks import On, Ranks
from tests.virtual_cluster import cluster as cluster  # a fixture
from tests.warm_runs import warm_braid as warm_braid  # a fixture

KEPT = 10  # processes; idle ones still cost memory
# Tests of one file share a worker, and those of these directories and files do: each worker that
# uses an engine first imports vLLM for its fork server, and starts engines of its own; those of the
# audit share a run, and fork it from servers that have imported everything, as the files beside
# them do (tests/warm_runs.py).
TOGETHER = {
    "tests/engine/": "engines",
    "tests/audit/": "runs",
    "tests/end_to_end/test_collected.py": "runs",
    "tests/end_to_end/test_merged_weights.py": "runs",
    "tests/end_to_end/test_preference.py": "runs",
    "tests/end_to_end/test_quantized.py": "runs",
    "tests/end_to_end/test_smoke_run.py": "runs",
}


class _Scheduling(LoadFileScheduling):
    """Give every worker whole files, or all files that share what is costly."""

    def _split_scope(self, nodeid: str) -> str:
        scopes = (scope for start, scope in TOGETHER.items() if nodeid.startswith(start))
        return next(scopes, super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    """Schedule by files and directories, whatever `--dist` says."""
    return _Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Compute with one thread, as ranks do: two take five times the CPU, waiting for each other."""
    if "torch" in sys.modules:  # not where the selected tests never import it
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _environment_as_found() -> Iterator[None]:
    """Fail the test that leaves another environment behind, not those that follow it.

    Variables may be added: Megatron sets some of Transformer Engine's.
    """
    found = {name: os.environ[name] for name in os.environ if name != "PYTEST_CURRENT_TEST"}
    yield
    left = {name: os.environ.get(name) for name in found}
    os.environ.update(found)
    assert left == found


@pytest.fixture(scope="session")
def on() -> Iterator[On]:
    """`on(layout, function, *arguments)`: what the function returns on each of its ranks."""
    alive: dict[LayoutSettings, Ranks] = {}

    def run(layout: LayoutSettings, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        # What process groups do not depend on.
        other = {"distributed_optimizer": True, "recompute": "none", "recompute_modules": ()}
        uneven = dict.fromkeys(("first_stage_layers", "last_stage_layers"))
        key = layout.model_copy(update={**other, **uneven})
        ranks = alive.pop(key, None)
        while ranks is None and alive and layout.ranks + sum(k.ranks for k in alive) > KEPT:
            alive.pop(next(iter(alive))).close()  # unused for longest
        alive[key] = ranks or Ranks(layout)
        try:
            return alive[key](function, *arguments)
        except AssertionError:
            # Other ranks may have answered too, or still wait: neither belongs to the next call.
            if layout.ranks > 1:
                alive.pop(key).close()
            raise

    yield run
    for ranks in alive.values():
        ranks.close()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Make the test process the only rank of its process groups."""
    from parallel.distributed import process_groups  # here, for tests that never import torch

    with socket.socket() as probe, pytest.MonkeyPatch.context() as environment:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            environment.setenv(name, str(value))
        with process_groups(LayoutSettings(), seed=0):
            yield
