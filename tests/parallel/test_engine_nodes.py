"""The processes of an engine over several nodes meet where its first one says."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from parallel.engine.nodes import MeetingPoint, meeting_point, node_rank
from parallel.errors import UserError
from parallel.settings import EngineJob, EngineSettings
from tests.awaiting import PATIENCE_SECONDS
from tests.pipeline.checkpoint_headers import SMALL


def engine_job(directory: Path, nodes: int = 2, seconds: int = 30) -> EngineJob:
    engine = EngineSettings(tensor=4, start_timeout_seconds=seconds)
    return EngineJob(
        model=SMALL,
        engine=engine,
        index=3,
        address=directory / "address.json",
        nodes=nodes,
        seed=1,
    )


def as_task(monkeypatch: pytest.MonkeyPatch, rank: int, step: int = 5) -> None:
    for name, value in {"PROCID": rank, "JOB_ID": 17, "STEP_ID": step}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_nodes_meet_where_the_first_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, found = engine_job(tmp_path), list[MeetingPoint]()
    as_task(monkeypatch, 1)
    assert node_rank(job) == 1
    waiting = threading.Thread(target=lambda: found.append(meeting_point(job)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    as_task(monkeypatch, 0)
    published = meeting_point(job)
    waiting.join(PATIENCE_SECONDS)
    assert found == [published]
    assert published.address == "127.0.0.1" and published.port > 0


def test_a_restarted_engine_does_not_read_the_old_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = engine_job(tmp_path, seconds=1)
    as_task(monkeypatch, 0)
    meeting_point(job)
    as_task(monkeypatch, 1, step=6)
    message = r"engine 3, node rank 1: .* after 1 s \(engine\.start_timeout_seconds\)"
    with pytest.raises(UserError, match=message):
        meeting_point(job)
    as_task(monkeypatch, 0, step=6)
    meeting_point(job)
    assert [path.name for path in tmp_path.iterdir()] == ["meeting.17_6.json"]


def test_an_engine_of_one_node_is_its_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert node_rank(engine_job(tmp_path, nodes=1)) == 0
