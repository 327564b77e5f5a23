"""How long a plan says that stages still take."""

from __future__ import annotations

import json

import pytest

from pipeline.estimate import estimate
from pipeline.graph import compile_graph
from pipeline.report import left_line
from pipeline.run_directory import RunDirectory
from pipeline.states import StageState
from stages.settings import RunSettings


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
    stages = compile_graph(settings)
    log(run, "cold_start", [0.0, 1.0])
    # A night lies between two steps of a resumed stage.
    log(run, "experts.sums", [0.0, 3.0, 50_000.0, 50_003.0, 50_006.0])
    done = StageState("done", step=2)
    begun = StageState("failed", step=1)
    found = estimate(
        run, settings, stages, states(settings, cold_start=done, experts_of_sums=begun), {}
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
        "about 9 s left, 0.005 hours of a rank; without merge, evaluate, export"
    )


def test_what_has_no_steps_takes_what_it_took_before(
    run: RunDirectory, settings: RunSettings
) -> None:
    found = estimate(run, settings, compile_graph(settings), states(settings), {"evaluate": 1.5})
    assert found.seconds["evaluate"] == 90.0


def test_stale_stages_start_anew_and_engines_of_their_own_count(
    run: RunDirectory, settings: RunSettings
) -> None:
    own = settings.engine.model_copy(update={"placement": "own", "count": 2})
    settings = settings.model_copy(update={"engine": own})
    log(run, "cold_start", [0.0, 4.0])
    stale = StageState("stale", "seed was 0", step=1)
    found = estimate(run, settings, compile_graph(settings), states(settings, cold_start=stale), {})
    assert (found.seconds["cold_start"], found.devices) == (8.0, 4)


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"step": 1, "time": 5}\n'])
def test_nothing_is_told_from_too_little(
    run: RunDirectory, settings: RunSettings, text: str
) -> None:
    path = run.stage("cold_start").metrics
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = estimate(run, settings, compile_graph(settings), states(settings), {})
    assert set(found.seconds.values()) == {None}
    assert "is not known before" in left_line(found)
