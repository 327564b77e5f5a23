"""Trackers get what a stage logs, read back by each one's own reader; none can end a stage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.sdk.data_types._private import MEDIA_TMP

from stages.metrics import MetricsLog
from stages.sampling.sample_files import samples_file, write_samples
from stages.settings import LoggingSettings, StageJob
from stages.trackers.tracker import ROWS, key
from tests.awaiting import PATIENCE_SECONDS
from tests.pipeline.recorded_runs import sample
from tests.stages.test_metrics import job

STEPS = 4


def logged(stage: StageJob, *steps: int) -> None:
    """Log steps of a stage, the last of which saves a checkpoint, as the loop does."""
    log = MetricsLog(stage, STEPS)
    for step in steps:
        rows = [sample(step, f"prompt {number}", 1.0) for number in range(40)]
        write_samples(samples_file(stage.files.rollouts, step), rows)
        log.write(step, {"loss": 1 / step, "reward/exact": 0.5, "kl/sums": 0.1, "kl/words": 0.2})
    checkpoint = stage.files.checkpoints / f"step_{steps[-1]}"
    checkpoint.mkdir(parents=True)
    log.saved(steps[-1])
    (checkpoint / "checksums.json").write_text('{"digest": "d1", "files": {}}')
    log.close()


@pytest.fixture
def stage(tmp_path: Path) -> StageJob:
    """A stage with a parent in its manifest."""
    (tmp_path / "manifest.json").write_text('{"parents": {"base": "d0"}}')
    return job(tmp_path, "wandb", "tensorboard", "trackio")


@pytest.fixture(autouse=True)
def trackio_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep trackio's database out of the home directory."""
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")


def records(directory: Path) -> list[dict[str, Any]]:
    """Return what Weights & Biases wrote offline last, by its own reader."""
    [*_, path] = sorted(directory.glob("wandb/offline-run-*"))
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(directory: Path) -> list[dict[str, Any]]:
    """Return the lines that were logged to Weights & Biases."""
    found = records(directory)
    return [each["history"]["item"] for each in found if each["type"] == "history"]


def test_weights_and_biases_has_the_metrics_by_panel(stage: StageJob) -> None:
    logged(stage, 1, 2)
    rows = [row for row in history(stage.directory) if "learning/loss" in row]
    assert [(row["step"], row["learning/loss"]) for row in rows] == [(1, 1.0), (2, 0.5)]
    assert {"learning/reward/exact", "policy/kl/sums", "policy/kl/words"} <= rows[0].keys()
    [run] = [each["run"] for each in records(stage.directory) if each["type"] == "run"]
    about = [run[name] for name in ("run_group", "job_type", "display_name", "run_id")]
    assert about == ["a", "cold_start", "a/cold_start", f"a-cold_start-{stage.files.tracker_id()}"]


def test_weights_and_biases_has_samples_and_lineage(stage: StageJob) -> None:
    logged(stage, 1)
    [row] = [row for row in history(stage.directory) if "samples" in str(row.keys())]
    assert row["step"] == 1
    [table] = (stage.directory / "wandb").rglob("*.table.json")
    found = json.loads(table.read_text())
    assert found["columns"][:3] == ["step", "domain", "problem"]
    assert 0 < len(found["data"]) <= ROWS
    [artifact] = [
        each["artifact"]
        for each in records(stage.directory)
        if each["type"] == "artifact" and each["artifact"]["type"] == "checkpoint"
    ]
    assert json.loads(artifact["metadata"]) == {
        "digest": "d1",
        "step": 1,
        "parents": {"base": "d0"},
    }


def test_samples_arrive_though_another_fork_removed_the_directory(stage: StageJob) -> None:
    """As the first rank of a fork server does at its end, for all that have wandb's from there."""
    shutil.rmtree(MEDIA_TMP.name, ignore_errors=True)
    logged(stage, 1)
    assert len(list((stage.directory / "wandb").rglob("*.table.json"))) == 1


def test_a_resumed_stage_is_the_same_run(stage: StageJob) -> None:
    logged(stage, 1, 2)
    logged(stage, 3)
    ids = {
        path.name.rpartition("run-")[2].removesuffix(".wandb")
        for path in (stage.directory / "wandb").glob("offline-run-*/*.wandb")
    }
    assert ids == {f"a-cold_start-{stage.files.tracker_id()}"}


def test_tensorboard_has_them_too(stage: StageJob) -> None:
    logged(stage, 1, 2)
    found = EventAccumulator(str(stage.directory / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("learning/loss")] == [
        (1, 1),
        (2, 0.5),
    ]
    [text] = found.Tensors("samples/text_summary")
    assert b"prompt 0" in text.tensor_proto.string_val[0]
    [lineage] = found.Tensors("lineage/text_summary")
    assert b"from base: d0" in lineage.tensor_proto.string_val[0]


def test_trackio_has_them_too(stage: StageJob) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    logged(stage, 1, 2)
    name = f"a-cold_start-{stage.files.tracker_id()}"
    rows = [row for row in SQLiteStorage.get_logs("other", name) if "learning/loss" in row]
    assert [(row["step"], row["learning/loss"]) for row in rows] == [(1, 1.0), (2, 0.5)]


@pytest.mark.parametrize("when", ["start", "log"])
def test_a_tracker_that_fails_is_named_and_ends_nothing(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("log in first")

    class Dying:
        id = "x"
        log = finish = log_artifact = refuse

        def define_metric(self, *_: object, **__: object) -> None:
            pass

    monkeypatch.setattr("wandb.init", refuse if when == "start" else lambda **_: Dying())
    stage = job(tmp_path, "wandb", "tensorboard")
    logged(stage, 1, 2)
    assert (
        capfd.readouterr().err.count(
            "logs no more to wandb, which failed: PermissionError('log in first')"
        )
        == 1
    )
    assert len(stage.files.metrics.read_text().splitlines()) == 2
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert len(found.Scalars("learning/loss")) == 2


def test_an_evaluation_is_by_domain_and_model() -> None:
    assert key("accuracy", {"model": "merge", "domain": "sums"}) == "evaluation/sums/merge/accuracy"


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forever = Event()
    monkeypatch.setattr("wandb.init", lambda **_: forever.wait(60))
    monkeypatch.setattr("stages.trackers.tracker.CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("stages.trackers.tracker.MOST_WAITING", 3)
    log = MetricsLog(job(tmp_path, "wandb"), STEPS)
    for step in range(1, 11):
        log.write(step, {"loss": 1.0})
    log.close()
    said = capfd.readouterr().err
    assert "which is 3 messages behind" in said
    assert "which did not end in 0.2 s" in said
    forever.set()


def test_damaged_samples_end_nothing(stage: StageJob) -> None:
    log = MetricsLog(stage, STEPS)
    path = samples_file(stage.files.rollouts, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no Parquet")
    checkpoint = stage.files.checkpoints / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checksums.json").write_text('{"digest": "d1", "files": {}}')
    log.saved(1)
    log.write(2, {"loss": 1.0})
    log.close()


def test_every_checkpoint_is_sent_though_the_next_begins_before_it_is_whole(
    stage: StageJob,
) -> None:
    log = MetricsLog(stage, STEPS)
    for step in (1, 2):
        log.saved(step)
        log.write(step, {"loss": 1.0})
    for step in (1, 2):
        checkpoint = stage.files.checkpoints / f"step_{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "checksums.json").write_text('{"digest": "d1", "files": {}}')
    log.close()
    found = EventAccumulator(str(stage.directory / "tensorboard"))
    found.Reload()
    assert [each.step for each in found.Tensors("lineage/text_summary")] == [1, 2]


def test_a_rerun_is_another_run(stage: StageJob) -> None:
    before = stage.files.tracker_id()
    assert stage.files.tracker_id() == before
    (stage.directory / "tracker_id").unlink()  # moved away with what is replaced
    assert stage.files.tracker_id() != before


def test_weights_and_biases_may_be_disabled() -> None:
    """As runs of earlier versions have it."""
    assert LoggingSettings(wandb="disabled").active_trackers == ()
    assert LoggingSettings(wandb="online", trackers=("trackio", "wandb")).active_trackers == (
        "trackio",
        "wandb",
    )
