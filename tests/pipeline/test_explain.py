"""The output of `braid why`, `braid diff` and `braid plan --dot`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.report.explain import _with_cause
from pipeline.report.status import can_continue, next_action
from pipeline.run.graph import compile_graph
from pipeline.run.ledger import State
from pipeline.run.run import StageState
from stages.settings import RunSettings

Braid = Callable[..., tuple[int, str, str]]


def test_why_tells_the_cause_the_parents_and_the_history(
    braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config, actions={"merge": {"1": "say_why"}})[0] == 1
    code, out, _ = braid("why", "small", "merge")
    assert code == 0
    first, *lines = out.splitlines()
    assert first.startswith("merge is failed: ")
    used = "  from experts.sums, which is done: finished; it used checkpoint "
    assert any(line.startswith(used) for line in lines)
    begun, ended = [line.partition("  attempt 1: ")[2] for line in lines if "  attempt " in line]
    assert begun == "running: from the start"
    assert ended.startswith("failed after ")

    code, out, _ = braid("why", "small", "evaluate")
    assert out.splitlines()[:2] == ["evaluate is pending", "  it never started"]
    assert f"  from {first.replace(' is ', ', which is ')}" in out

    (runs / "small/stages/cold_start/manifest.json").write_text("{}")
    _, out, _ = braid("why", "small", "cold_start")
    assert out.startswith("cold_start is stale: its manifest.json is missing or damaged\n")
    assert "it never started" not in out


def test_a_running_stage_is_described_by_its_first_step(settings: RunSettings) -> None:
    stages = compile_graph(settings)
    states = {stage.name: StageState("running", "from step 4") for stage in stages}
    assert set(next_action(stages, states).values()) == {"runs, from step 4"}
    assert _with_cause(states["merge"]) == "running, from step 4"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        *(("pending", True), ("failed", True), ("done", True)),
        *(("running", False), ("submitted", False), ("stale", False)),
    ],
)
def test_a_run_continues_unless_a_stage_runs_is_submitted_or_is_stale(
    state: State, expected: bool, settings: RunSettings
) -> None:
    stages = compile_graph(settings)
    states = {stage.name: StageState("pending") for stage in stages}
    assert can_continue(stages, {**states, "cold_start": StageState(state)}) == expected


def test_why_knows_the_names_of_stages(braid: Braid, config: Path) -> None:
    braid("run", config)
    code, _, err = braid("why", "small", "experts.sum")
    assert code == 1
    assert 'has no stage experts.sum; did you mean "experts.sums"?' in err


def test_diff_tells_settings_and_checkpoints_apart(braid: Braid, config: Path) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        assert braid("run", config, "--name", name, f"seed={seed}")[0] == 0
    code, out, _ = braid("diff", "one", "two")
    assert code == 0
    assert out.startswith("settings\n  seed: 1 | 2\n")
    assert braid("diff", "one", "one")[:2] == (0, "no difference\n")


def test_diff_tells_what_only_one_run_has_begun(braid: Braid, config: Path) -> None:
    braid("run", config, "--name", "one")
    braid("run", config, "--name", "two", actions={"merge": {"1": "say_why"}})
    _, out, _ = braid("diff", "one", "two")
    assert "evaluate\n  started: true | false\n" in out


def test_the_drawing_has_an_arrow_for_every_input(braid: Braid, config: Path) -> None:
    code, out, _ = braid("plan", config, "--dot")
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == 'digraph "small" {'
    assert lines[-1] == "}"
    assert '"cold_start" -> "experts.sums";' in lines
    assert '"experts.sums" -> "merge" [style=dashed, label=teaches];' in lines
    assert sum("->" in line for line in lines) == 2 + 3 + 4 + 1
