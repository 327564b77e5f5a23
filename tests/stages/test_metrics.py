"""Metrics are declared, documented, and cut back to the checkpoint on resume."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from parallel.files import keep_steps
from stages.metrics import MetricsLog, reduce_sums
from stages.objectives.loss import MetricSum, Totals
from stages.settings import LoggingSettings, RunSettings, StageJob


def job(directory: Path, wandb: Literal["offline", "disabled"] = "disabled") -> StageJob:
    logging = LoggingSettings(wandb=wandb, project="other")
    settings = RunSettings.model_construct(name="a", logging=logging)
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


def test_a_step_does_not_wait_for_weights_and_biases_but_its_metrics_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start, logged = Event(), []

    def start(project: str, mode: str, **_: object) -> SimpleNamespace:
        assert (project, mode) == ("other", "offline")
        assert may_start.wait(30)
        return SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics)))

    monkeypatch.setattr("wandb.init", start)
    log = MetricsLog(job(tmp_path, "offline"), steps=3)  # returns, though nothing started
    may_start.set()
    log.write(1, {"loss": 2.0})
    assert logged == [(1, {"loss": 2.0})]


def test_a_failed_start_of_weights_and_biases_is_an_error_and_its_later_death_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError("log in first")

    monkeypatch.setattr("wandb.init", refuse)
    with pytest.raises(PermissionError, match="log in first"):
        MetricsLog(job(tmp_path, "offline"), steps=3).write(1, {"loss": 2.0})

    def die(*_: object, **__: object) -> None:
        raise BrokenPipeError("its service is gone")

    monkeypatch.setattr("wandb.init", lambda **_: SimpleNamespace(log=die, finish=die))
    log = MetricsLog(job(tmp_path, "offline"), steps=3)
    log.write(2, {"loss": 1.0})
    log.write(3, {"loss": 0.5})
    log.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().out.count("its service is gone") == 1


def test_closing_the_log_finishes_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = []
    run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: finished.append(True))
    monkeypatch.setattr("wandb.init", lambda **_: run)
    log = MetricsLog(job(tmp_path, "offline"), steps=1)
    log.write(1, {"loss": 2.0})
    log.close()
    assert finished == [True]


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
