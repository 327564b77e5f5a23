"""The time left of a plan's stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.report.time_left import Estimate, estimate, left_line
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.run import Run, StageState
from stages.settings import RunSettings

Braid = Callable[..., tuple[int, str, str]]


def log(run: RunDirectory, stage: str, times: list[float]) -> None:
    path = run.stage(stage).metrics
    path.parent.mkdir(parents=True)
    lines = [json.dumps({"step": step, "time": time}) for step, time in enumerate(times, start=1)]
    path.write_text("\n".join(lines) + '\n{"step": 99, "ti')


def states(settings: RunSettings, **known: StageState) -> dict[str, StageState]:
    pending = {stage.name: StageState("pending") for stage in compile_graph(settings)}
    return {**pending, **{name.replace("_of_", "."): state for name, state in known.items()}}


def test_a_stage_is_told_by_its_own_steps_or_by_those_of_its_kind(
    run: RunDirectory, settings: RunSettings
) -> None:
    log(run, "cold_start", [0.0, 1.0])
    # A night passed between two steps of a resumed stage.
    log(run, "experts.sums", [0.0, 3.0, 50_000.0, 50_003.0, 50_006.0])
    done = StageState("done", step=2)
    begun = StageState("failed", step=1)
    found = estimate(
        Run(run.path, settings), states(settings, cold_start=done, experts_of_sums=begun), {}
    )
    assert found.seconds == {
        "cold_start": 0.0,
        "experts.sums": 3.0,  # one of two steps is left
        "experts.words": 6.0,
        "merge": None,
        "evaluate": None,
        "export": None,
    }
    assert found.devices == 2
    assert left_line(found) == (
        "about 9 s left, less than 0.01 rank-hours; not counted: merge, evaluate, export, since no "
        "stage of their kinds has finished"
    )


def test_the_start_of_a_kind_counts_where_an_attempt_at_it_was_measured(
    run: RunDirectory, settings: RunSettings
) -> None:
    log(run, "experts.sums", [0.0, 3.0])
    took = {"experts.sums": 46.0}  # 40 s besides two steps of 3 s

    def words(state: StageState, attempts: int = 1) -> float | None:
        sums = StageState("done", step=2, attempts=attempts)
        known = states(settings, experts_of_sums=sums, experts_of_words=state)
        return estimate(Run(run.path, settings), known, took).seconds["experts.words"]

    assert words(StageState("pending")) == 46.0
    assert words(StageState("failed", step=1)) == 43.0
    assert words(StageState("running", step=1)) == 3.0
    # What a second attempt took is not of all steps.
    assert words(StageState("pending"), attempts=2) == 6.0


def test_what_has_no_steps_takes_what_it_took_before(
    run: RunDirectory, settings: RunSettings
) -> None:
    found = estimate(Run(run.path, settings), states(settings), {"evaluate": 90.0})
    assert found.seconds["evaluate"] == 90.0


def test_stale_stages_start_anew_and_engines_of_their_own_count(
    run: RunDirectory, settings: RunSettings
) -> None:
    own = settings.engine.model_copy(update={"placement": "own", "count": 2})
    settings = settings.model_copy(update={"engine": own})
    log(run, "cold_start", [0.0, 4.0])
    stale = StageState("stale", "seed was 0", step=1)
    found = estimate(Run(run.path, settings), states(settings, cold_start=stale), {})
    assert (found.seconds["cold_start"], found.devices) == (8.0, 4)


@pytest.mark.parametrize(
    ("seconds", "devices", "line"),
    [
        ({"merge": 1e-4}, 2, "less than 1 s left, less than 0.01 rank-hours"),
        ({"merge": 40.0}, 2, "about 40 s left, 0.02 rank-hours"),
        ({"merge": 5400.0, "evaluate": 1800.0}, 2, "about 2 h 00 min left, 4.00 rank-hours"),
        (
            {"merge": 40.0, "evaluate": None},
            2,
            "about 40 s left, 0.02 rank-hours; not counted: evaluate, since no stage of its kind "
            "has finished",
        ),
        ({"merge": 7.2e6}, 16, "about 2000 h 00 min left, 32,000 rank-hours"),
        ({"merge": 0.0}, 2, "nothing left to run"),
        (
            {"merge": 0.0, "evaluate": None},
            2,
            "time left unknown: no stage of kind evaluate has finished yet",
        ),
    ],
)
def test_an_estimate_is_told_in_numbers_that_mean_something(
    seconds: dict[str, float | None], devices: int, line: str
) -> None:
    kinds = [name for name, left in seconds.items() if left is None]
    assert left_line(Estimate(seconds, devices, kinds=kinds)) == line


def test_a_plan_estimates_from_attempts_that_ended_well(braid: Braid, config: Path) -> None:
    def left(*options: str) -> dict[str, str]:
        rows = [line.split() for line in braid("plan", config, *options)[1].splitlines()]
        return {row[0]: " ".join(row[-3:]) for row in rows}

    assert braid("run", config, actions={"evaluate": {"0": "say_why"}})[0] == 1
    assert left()["evaluate"].endswith(" ?")
    assert braid("resume", "small")[0] == 0
    assert "nothing left to run; " in braid("plan", config)[1]
    assert left("--name", "second")["evaluate"].endswith(" ?")
    assert braid("resume", "small", "--from", "evaluate", actions={"evaluate": {"0": "say_why"}})[0]
    assert left()["evaluate"].endswith(" s")


@pytest.mark.parametrize("text", ["", "nonsense\n", "[" * 10_000, '{"step": 1, "time": 5}\n'])
def test_nothing_is_told_from_too_little(
    run: RunDirectory, settings: RunSettings, text: str
) -> None:
    path = run.stage("cold_start").metrics
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = estimate(Run(run.path, settings), states(settings), {})
    assert set(found.seconds.values()) == {None}
    assert left_line(found) == (
        "time left unknown: no stage of kind sft, grpo, distill, evaluate, export has finished yet"
    )
