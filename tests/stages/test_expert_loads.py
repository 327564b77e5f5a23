"""The experts that samples used, counted by domain and layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from parallel.sample import Sample
from stages.sampling.recording import expert_slots, record_loads

EXPERTS = 4


def routed(domain: str, problem: str, *routes: list[list[int]]) -> Sample:
    """Return a sample whose tokens took these experts, layer by layer."""
    sample = Sample(domain, np.array([2], np.int32), np.array([3] * len(routes), np.int32))
    sample.problem, sample.routes = problem, np.array(routes, np.uint16)
    return sample


def test_every_slot_is_counted_once() -> None:
    draw = np.random.default_rng(0)
    routes = [
        np.argsort(draw.random((tokens, 3, EXPERTS)), -1)[..., :2].astype(np.uint16)
        for tokens in (5, 1, 9)
    ]
    found = expert_slots(routes, EXPERTS)
    whole = np.concatenate(routes)
    assert found.shape == (3, EXPERTS)
    assert (found.sum(1) == 15 * 2).all()
    for layer in range(3):
        for expert in range(EXPERTS):
            assert found[layer, expert] == (whole[:, layer] == expert).sum()


def test_loads_are_of_the_recorded_prompts_by_domain(tmp_path: Path) -> None:
    path = tmp_path / "routing" / "step_000007.parquet"
    low, high = "0" * 64, "f" * 64
    samples = [
        routed("sums", low, [[0, 1], [2, 3]], [[0, 2], [2, 3]]),
        routed("sums", high, [[3, 1], [0, 1]]),
        routed("words", low, [[1, 2], [0, 3]]),
    ]
    # Expert 3 of the first layer and expert 1 of the second are chosen in no domain.
    found = record_loads(path, 7, samples, EXPERTS, 0.5)
    assert found == {"idle_experts": 2 / 8}
    rows = parquet.ParquetFile(path).read(use_threads=False).to_pylist()
    assert [(row["step"], row["domain"], row["layer"], row["slots"]) for row in rows] == [
        (7, "sums", 0, [2, 1, 1, 0]),
        (7, "sums", 1, [0, 0, 2, 2]),
        (7, "words", 0, [0, 1, 1, 0]),
        (7, "words", 1, [1, 0, 0, 1]),
    ]


def test_without_routes_nothing_is_written(tmp_path: Path) -> None:
    sample = routed("sums", "0" * 64, [[0, 1]])
    sample.routes = None
    assert record_loads(tmp_path / "step.parquet", 1, [sample], EXPERTS, 1.0) == {}
    assert not list(tmp_path.iterdir())
