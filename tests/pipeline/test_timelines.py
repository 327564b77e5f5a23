"""Timelines: what a process writes of its phases, and what `braid look --waits` says of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import pytest

from parallel import timeline
from parallel.timeline import open_timeline, phase
from pipeline.run.timeline import innermost, phases
from stages.settings import RunSettings
from tests.pipeline.measured_runs import Measured, write_run

Braid = Callable[..., tuple[int, str, str]]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The file of this process's timeline."""
    open_timeline(tmp_path / "attempt" / "timeline_0.jsonl")
    yield tmp_path / "attempt" / "timeline_0.jsonl"
    timeline._file = None


def spans(path: Path) -> list[tuple[str, bool, str | None, int | None]]:
    return [(p.name, p.end is None, p.waits_for, p.step) for p in phases(path, "rank 0")]


def test_a_phase_is_seen_while_it_lasts(path: Path) -> None:
    before = time.time()
    with phase("step", step=3):
        with phase("wait", waits_for="engines"):
            assert spans(path) == [("step", True, None, 3), ("wait", True, "engines", None)]
        found = phases(path, "rank 0")
        present = innermost(found)
        assert present is not None and present.name == "step"
    step, wait = phases(path, "rank 0")
    assert step.end is not None and wait.end is not None
    assert before <= step.begin <= wait.begin <= wait.end <= step.end <= time.time()
    assert innermost([step, wait]) is None


def test_a_phase_ends_with_an_error(path: Path) -> None:
    with pytest.raises(KeyError), phase("train"):
        raise KeyError
    assert spans(path) == [("train", False, None, None)]


def test_another_process_cuts_what_the_last_one_did(path: Path) -> None:
    lost = phase("sample")
    lost.__enter__()
    open_timeline(path)
    with phase("load"):
        assert [each[:2] for each in spans(path)] == [("sample", False), ("load", True)]
    lost.__exit__(None, None, None)


@pytest.mark.parametrize("damage", ['{"phase": 1, "na', "[]", "{}", '{"time": "x"}', "\x00"])
def test_a_damaged_line_is_skipped(path: Path, damage: str) -> None:
    with phase("train"), path.open("a") as file:
        file.write(f"{damage}\n")
    assert spans(path) == [("train", False, None, None)]


def test_a_full_disk_ends_the_timeline_and_not_the_process(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline._file = FileIO("/dev/full", "w")
    with phase("train"), phase("wait"):
        pass
    assert timeline._file is None
    assert "the timeline ends here" in capsys.readouterr().out
    assert spans(path) == []


def test_without_a_file_a_phase_does_nothing() -> None:
    with phase("train"):
        pass


def test_every_process_of_a_running_stage_is_shown(
    runs: Path, settings: RunSettings, braid: Braid
) -> None:
    run = write_run(runs / "small", settings, Measured({}))
    run.ledger.append("experts.sums", "running", "", 2, None)
    now, attempt = time.time(), run.stage("experts.sums").job(2).parent
    attempt.mkdir()
    write(attempt / "timeline_0.jsonl", now - 100, ("step", 3, None), ("wait", None, "rewards"))
    write(attempt / "timeline_1.jsonl", now - 50, ("step", 3, None), ("wait", None, "rank 0"))
    write(runs / "small" / "engine" / "0" / "timeline.jsonl", now - 30, ("sample", None, None))
    idle = runs / "small" / "engine" / "1" / "timeline.jsonl"
    write(idle, now - 200)
    with run.lock(shared=True), run.lock_stage("experts.sums"):
        code, out, err = braid("look", "small", "--waits", "--json")
        _, table, _ = braid("look", "small", "--waits")
    assert code == 0, err
    found = [
        (each["process"], each["phase"], each["waits_for"], round(each["seconds"], -1))
        for each in json.loads(out)["processes"]
    ]
    assert found[:3] == [
        ("rank 0", "wait of step 3", "rewards", 100),
        ("rank 1", "wait of step 3", "rank 0", 50),
        ("engine 0", "sample", None, 30),
    ]
    assert found[3][:3] == ("engine 1", "idle", "requests")
    assert table.splitlines()[1].split()[:2] == ["experts.sums", "rank"]


def write(path: Path, begin: float, *present: tuple[str, int | None, str | None]) -> None:
    """Write the timeline of a process that is in these phases since `begin`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"process": 1, "time": begin}]
    for number, (name, step, waits_for) in enumerate(present):
        line = {"phase": number, "name": name, "time": begin, "step": step, "waits_for": waits_for}
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_nothing_waits_in_a_run_that_is_done(
    runs: Path, settings: RunSettings, braid: Braid
) -> None:
    write_run(runs / "small", settings, Measured({}))
    assert braid("look", "small", "--waits")[1] == (
        f"no stage is running (6 done); where the time went: braid report {runs}/small, Time\n"
    )
