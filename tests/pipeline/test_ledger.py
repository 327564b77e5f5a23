"""The ledger survives whatever a crash leaves, and adds up an attempt's time."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.directory import RunDirectory
from pipeline.run.ledger import PUT_ASIDE, Ledger, latest, minutes

SOUND = {
    "time": "1970-01-01T00:00:00+00:00",
    "stage": "merge",
    "state": "done",
    "cause": "finished",
    "attempt": 1,
}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_an_absent_ledger_has_no_events(ledger: Ledger) -> None:
    assert ledger.events() == []


def test_half_a_line_is_no_event_and_spoils_no_other(ledger: Ledger) -> None:
    ledger.append("cold_start", "running", "from the start", 1)
    ledger.append("cold_start", "done", "finished", 1, seconds=90.0)
    text = ledger.path.read_text()
    ledger.path.write_text(text[:-20])
    assert [event.state for event in ledger.events()] == ["running"]

    ledger.append("cold_start", "running", "from step 20", 2)
    assert [event.cause for event in ledger.events()] == ["from the start", "from step 20"]


DAMAGED = {
    "nested": "[" * 100_000,
    "no object": "5",
    "no second": json.dumps(SOUND | {"time": "0001-01-01"}),
    "no state": json.dumps(SOUND | {"state": "fine"}),
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_line_is_no_event_and_spoils_no_other(ledger: Ledger, line: str) -> None:
    ledger.path.write_text(f"{json.dumps(SOUND)}\n{line}\n{json.dumps(SOUND)}\n")
    assert [event.timestamp for event in ledger.events()] == [0.0, 0.0]


@pytest.mark.parametrize("job", ["**", "[", "*", "7"])
def test_only_the_output_of_that_job_is_found(run: RunDirectory, job: str) -> None:
    run.slurm.mkdir(parents=True)
    assert run.output_of(job) is None
    (run.slurm / "merge-77.out").touch()
    (run.slurm / "merge-7.out").touch()
    assert run.output_of(job) == (run.slurm / "merge-7.out" if job == "7" else None)


def test_staleness_hides_no_earlier_state(ledger: Ledger) -> None:
    ledger.append("merge", "done", "finished", 1, seconds=1.0)
    ledger.append("merge", "stale", "seed was 0 and is now 1", 1)
    assert latest(ledger.events())["merge"].state == "done"


def test_minutes_are_summed_over_attempts(ledger: Ledger) -> None:
    ledger.append("merge", "running", "from the start", 1)
    ledger.append("merge", "failed", "rank 0 was killed by SIGKILL", 1, seconds=30.0)
    ledger.append("merge", "running", "from step 20", 2)
    ledger.append("merge", "done", "finished", 2, seconds=60.0)
    assert minutes(ledger.events()) == {"merge": 1.5}


def test_minutes_of_what_was_put_aside_do_not_count(ledger: Ledger) -> None:
    ledger.append("merge", "done", "finished", 1, seconds=600.0)
    ledger.append("evaluate", "done", "finished", 1, seconds=30.0)
    ledger.append("merge", "pending", f"{PUT_ASIDE}runs/small/replaced/merge.1", 0)
    assert minutes(ledger.events()) == {"evaluate": 0.5}
    ledger.append("merge", "done", "finished", 1, seconds=60.0)
    assert minutes(ledger.events()) == {"merge": 1.0, "evaluate": 0.5}


def test_a_full_disk_names_the_ledger(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> FileIO:
        return FileIO("/dev/full", "r+")

    monkeypatch.setattr("pipeline.run.ledger.open_in_place", full)
    ledger.path.parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(OSError, match=f"No space left on device: '{ledger.path}'"):
        ledger.append("merge", "done", "finished", 1)


def append_many(path: Path, writer: int, together: Any) -> None:
    together.wait()
    for number in range(50):
        Ledger(path).append(f"stage_{writer}", "running", "x" * number, number)
        if number % 10 == writer:  # as one that is killed in the middle of a line
            with path.open("ab") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)
                file.write(b'{"time": "2026-')


def test_writers_of_several_processes_never_mix_their_lines(ledger: Ledger) -> None:
    context = multiprocessing.get_context("spawn")  # the tests' workers have threads
    together = context.Barrier(4)
    writers = [
        context.Process(target=append_many, args=(ledger.path, writer, together))
        for writer in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = [(event.stage, event.attempt) for event in ledger.events()]
    assert len(found) == len(set(found)) == 4 * 50
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
