"""A log that is followed: nothing that is written before the stage has ended is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.report import explain
from stages.directory import StageDirectory


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(explain, "ASK_SECONDS", 0.0)


@pytest.fixture
def stage(tmp_path: Path) -> StageDirectory:
    """A stage whose first attempt has printed a line."""
    write(tmp_path / "attempt_1" / "rank_0.log", b"one\n")
    return StageDirectory(tmp_path)


def write(log: Path, text: bytes) -> None:
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        file.write(text)


def asked(*answers: Callable[[], bool]) -> Callable[[], bool]:
    """Return a question whether the stage continues, answered by these one after another."""
    left: Iterator[Callable[[], bool]] = iter(answers)
    return lambda: next(left)()


def test_what_is_written_while_the_state_is_asked_is_read(
    stage: StageDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    log = stage.path / "attempt_1" / "rank_0.log"

    def ends() -> bool:
        write(log, b"the last\n")
        return False

    explain.print_log(stage, "rank_0.log", asked(lambda: True, ends))
    assert capsys.readouterr().out == "one\nthe last\n"


def test_an_attempt_s_last_lines_stand_before_the_next_one_s(
    stage: StageDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    second = stage.path / "attempt_2" / "rank_0.log"

    def begins_anew() -> bool:
        write(stage.path / "attempt_1" / "rank_0.log", b"Traceback\n")
        write(second, b"two\n")
        return True

    explain.print_log(stage, "rank_0.log", asked(lambda: True, begins_anew, lambda: False))
    assert capsys.readouterr().out == f"one\nTraceback\n--- {second} ---\ntwo\n"


def test_a_rank_s_log_follows_srun_s(
    stage: StageDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    srun, rank = (stage.path / "attempt_2" / name for name in ("srun.log", "rank_0.log"))
    write(srun, b"srun: waits\n")

    def begins() -> bool:
        write(rank, b"two\n")
        return True

    explain.print_log(stage, "rank_0.log", asked(lambda: True, begins, lambda: False))
    assert capsys.readouterr().out == f"srun: waits\n--- {rank} ---\ntwo\n"


def test_a_letter_that_is_written_in_two_pieces_is_one(
    stage: StageDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    log = stage.path / "attempt_1" / "rank_0.log"

    def writes(text: bytes) -> bool:
        write(log, text)
        return True

    pieces = asked(
        lambda: writes("ü".encode()[:1]), lambda: writes("ü".encode()[1:]), lambda: False
    )
    explain.print_log(stage, "rank_0.log", pieces)
    assert capsys.readouterr().out == "one\nü"


def test_a_log_that_ends_within_a_letter_is_printed(
    stage: StageDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write(stage.path / "attempt_1" / "rank_0.log", "ü".encode()[:1])
    explain.print_log(stage, "rank_0.log", None)
    assert capsys.readouterr().out == "one\n\ufffd"


def test_what_is_written_while_the_next_attempt_is_looked_for_is_read(
    stage: StageDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (stage.path / f"attempt_{number}" / "rank_0.log" for number in (1, 2))
    looks = iter([False, False, True])  # when it begins, twice, and then once a round

    def newest() -> Path:
        if next(looks, False):
            write(first, b"Traceback\n")
            write(second, b"two\n")
        return second if second.exists() else first

    explain.print_log(stage, "rank_0.log", asked(lambda: True, lambda: False), newest)
    assert capsys.readouterr().out == f"one\nTraceback\n--- {second} ---\ntwo\n"
