"""The training loop saves, stops and leaves checkpoints as configured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.layouts.cases import SPREAD
from tests.layouts.loop_cases import loop
from tests.ranks import On
from tests.tiers import tiered


def steps(directory: Path) -> list[int]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("asynchronous", tiered([True, False], {True}))
def test_the_loop_saves_at_its_cadence_and_at_the_end(
    asynchronous: bool, on: On, tmp_path: Path
) -> None:
    expected = ("done", ["step_4", "step_5"])
    assert on(SPREAD, loop, str(tmp_path), None, None, asynchronous) == [expected] * 2
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    state = json.loads((tmp_path / "checkpoints" / "step_5" / "state.json").read_text())
    assert state == {"step": 5, "score": -last["loss"]}
    # A finished stage that is started again does nothing.
    assert on(SPREAD, loop, str(tmp_path), 5, None) == [expected] * 2
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_nan_stops_the_loop_before_it_is_saved(on: On, tmp_path: Path) -> None:
    for ending, left in on(SPREAD, loop, str(tmp_path), 4, None):
        assert ending.startswith("NotFiniteError: non-finite metrics at step 4 of toy")
        assert "'loss': nan" in ending
        assert left == ["step_2"]


def test_a_signal_to_one_rank_saves_on_all_ranks_and_the_loop_resumes(
    on: On, tmp_path: Path
) -> None:
    for ending, left in on(SPREAD, loop, str(tmp_path), None, 3):
        assert ending == "StageStopped: toy saved step 3 and stopped"
        assert left == ["step_2", "step_3"]
    assert [ending for ending, _ in on(SPREAD, loop, str(tmp_path), None, None)] == ["done"] * 2
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("verdict", "ending"), [("stop", "GuardStopped: enough"), ("end", "done")])
def test_all_ranks_follow_the_main_rank_s_watch(
    verdict: str, ending: str, on: On, tmp_path: Path
) -> None:
    expected = (ending, ["step_2", "step_3"])
    assert on(SPREAD, loop, str(tmp_path), None, None, True, verdict) == [expected] * 2
    assert steps(tmp_path) == [1, 2, 3]
    # An ended stage is done; a stopped one resumes.
    again = on(SPREAD, loop, str(tmp_path), None, None, True)
    assert (
        again == [("done", ["step_2", "step_3"] if verdict == "end" else ["step_4", "step_5"])] * 2
    )
    assert len(steps(tmp_path)) == (3 if verdict == "end" else 5)
