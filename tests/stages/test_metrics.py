"""Metrics are declared, documented, and cut back to the checkpoint on resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parallel.files import keep_steps
from parallel.settings import ModelSettings
from stages.metric_definitions import METRICS, PANELS, panel_of
from stages.metrics import MetricsLog, reduce_sums
from stages.objectives.loss import MetricSum, Totals
from stages.settings import LoggingSettings, RunSettings, StageJob, TrackerName


def job(directory: Path, *trackers: TrackerName) -> StageJob:
    """Return the job of a cold start in a run's directory."""
    logging = LoggingSettings(trackers=trackers, project="other")
    model = ModelSettings.model_construct()
    settings = RunSettings.model_construct(name="a", seed=0, logging=logging, model=model)
    return StageJob.model_construct(
        stage="cold_start", directory=directory, attempt=1, settings=settings
    )


def test_an_undeclared_metric_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="rewrad"):
        MetricsLog(job(tmp_path), steps=3).write(1, {"rewrad": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_resuming_drops_later_steps_and_a_half_written_line(tmp_path: Path) -> None:
    log = MetricsLog(job(tmp_path), steps=9)
    for step in (1, 2, 3):
        log.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    keep_steps(log.path, 2)
    MetricsLog(job(tmp_path), steps=9).write(3, {"loss": 30.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize(
    "damaged",
    [b"[1]", b"5", b'{"loss": 1.0}', b'{"step": "2"}', b"\xff\xfe", b"\0\0\0", b"[" * 100_000, b""],
)
def test_resuming_drops_a_damaged_line_and_no_other(tmp_path: Path, damaged: bytes) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 2}\n{"step": 3}\n')
    keep_steps(log, 2)
    assert log.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    keep_steps(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


def test_sums_are_divided_by_their_own_global_count() -> None:
    part = {
        "ratio": MetricSum(torch.tensor(3.0), "sequences"),
        "entropy": MetricSum(torch.tensor(10.0), "tokens"),
    }
    both, counts = [(["sums"], part), (["sums"], part)], {"sums": Totals(4, 40)}
    assert reduce_sums(both, counts) == {"ratio": 1.5, "entropy": 0.5}
    # Of four responses two have tokens that are learned.
    counts = {"sums": Totals(4, 40, learned=2)}
    assert reduce_sums(both[:1], counts)["ratio"] == 1.5


def test_a_metric_is_of_the_domains_that_have_it() -> None:
    counts = {"sums": Totals(4, 40), "words": Totals(2, 10), "none": Totals(0, 0)}
    entropy, kl = (MetricSum(torch.tensor(10.0), "tokens") for _ in range(2))
    sums = [
        (["sums", "words"], {"entropy": entropy}),
        (["words"], {"kl": kl, "kl/words": kl}),
        (["none"], {"kl": kl, "kl/none": kl}),
    ]
    assert reduce_sums(sums, counts) == {"entropy": 0.2, "kl": 2.0, "kl/words": 1.0}


def test_every_metric_is_in_one_panel() -> None:
    named = [name for metrics in PANELS.values() for name in metrics.split()]
    assert sorted(named) == sorted(METRICS)
    assert panel_of("staleness_3") == "engines"
    assert panel_of("reward/exact") == "learning"
