"""Runs that gates stop, warn of and let pass; overriding one, and every wrong way to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.violations import cells, edited

Braid = Callable[..., tuple[int, str, str]]
GATES = (
    "stages.experts.gate={domains: [sums], problems: 20, max_mismatch: 1e-4}",
    "stages.merge.gate={problems: 30}",
)
FALLS_SHORT = {"gates.experts.sums": {"0": "fall_short"}}
SAID = (
    "gate: experts.sums gains -20.0 points (paired 95 %: -23.9 to -16.0) over cold_start on sums; "
)


def events(run: Path, stage: str) -> list[tuple[str, str]]:
    lines = map(json.loads, (run / "ledger.jsonl").read_text().splitlines())
    return [(line["state"], line["cause"]) for line in lines if line["stage"] == stage]


def attempts(run: Path) -> dict[str, int]:
    return {
        stage.name: len(list(stage.glob("attempt_*"))) for stage in sorted(run.glob("stages/*"))
    }


@pytest.fixture
def stopped(braid: Braid, config: Path, runs: Path) -> Path:
    """A run that its first gate has stopped."""
    code, _, err = braid("run", config, *GATES, actions=FALLS_SHORT)
    assert code == 1
    assert err.startswith(f"braid: {SAID}")
    assert f"\n  braid gate override {runs}/small gates.experts.sums --reason " in err
    return runs / "small"


def test_gates_that_pass_let_a_run_come_to_its_end(braid: Braid, config: Path, runs: Path) -> None:
    code, out, err = braid("run", config, *GATES, "evaluation.samples_per_problem=4")
    assert (code, err) == (0, "")
    assert (
        "[4/8] gates.experts.sums  passed: experts.sums gains +20.0 points (paired 95 %: +16.0 to "
        "+23.9) over" in out
    )
    assert "; mismatch_max reaches 2e-05 in the last 2 steps of experts.sums\n" in out
    assert "[6/8] gates.merge  passed: merge solves 70.0 % of sums, experts.sums 50.0 %; " in out
    assert events(runs / "small", "gates.experts.sums")[-1][1].startswith(
        "passed: experts.sums gains"
    )
    job = json.loads((runs / "small/stages/gates.merge/attempt_1/job.json").read_text())
    assert job["settings"]["evaluation"]["problems"] == 30
    assert job["settings"]["evaluation"]["samples_per_problem"] == 1
    assert job["evaluated_on"]["experts.words"] == ["words"]
    assert braid("status")[1] == "small: 8 done\n"
    assert list(json.loads((runs / "small/results.json").read_text())["models"]) == [
        "cold_start",
        "experts.sums",
        "experts.words",
        "merge",
    ]


def test_a_gate_asks_for_its_own_number_of_answers(braid: Braid, config: Path, runs: Path) -> None:
    gates = (GATES[0].replace("problems: 20", "problems: 20, samples_per_problem: 2"), GATES[1])
    code, out, err = braid("run", config, *gates, "evaluation.samples_per_problem=4")
    assert (code, err) == (0, "")
    assert "gates.experts.sums  passed: experts.sums gains +10.0 points" in out  # half of each
    for name, answers in (("gates.experts.sums", 2), ("gates.merge", 1), ("evaluate", 4)):
        job = json.loads((runs / f"small/stages/{name}/attempt_1/job.json").read_text())
        assert job["settings"]["evaluation"]["samples_per_problem"] == answers


def test_a_gate_that_stops_lets_nothing_start_that_waits_for_it(
    braid: Braid, config: Path, stopped: Path
) -> None:
    made = {"cold_start": 1, "experts.sums": 1, "experts.words": 1, "gates.experts.sums": 1}
    assert attempts(stopped) == made
    [_, (state, cause)] = events(stopped, "gates.experts.sums")
    assert (state, cause) == (
        "failed",
        f"{SAID}the lower 95 % bound must be at least stages.experts.gate.min_gain = +0.0",
    )
    code, _, err = braid("resume", "small")
    assert (code, err.splitlines()[0]) == (1, f"braid: {cause}")
    assert attempts(stopped) == made
    code, _, err = braid("resume", "small", "--only", "merge")
    assert code == 1
    assert "  merge waits for gates.experts.sums, which is failed\n" in err


def test_a_stopped_gate_hides_no_results(braid: Braid, config: Path, runs: Path) -> None:
    short = {"gates.merge": {"0": "fall_short"}}
    table = "accuracy in %, with 95 % intervals; "
    code, out, err = braid("run", config, GATES[1], actions=short)
    assert code == 1
    assert "\nstages that wait for gates.merge do not start. Edit" in err
    assert table in out
    assert out.endswith(f"\nresults: {runs}/small/results.json\n")
    models = json.loads((runs / "small/results.json").read_text())["models"]
    assert "merge" in models
    assert json.loads(braid("status", "small", "--json")[1])["results"] == models
    code, out, _ = braid("resume", "small")
    assert (code, table in out) == (1, True)


def test_a_gate_that_none_waits_for_says_so(braid: Braid, config: Path, runs: Path) -> None:
    alone = edited(config, "  export: {kind: export, from: merge}\n", "")
    code, out, err = braid("run", alone, GATES[1], actions={"gates.merge": {"0": "fall_short"}})
    assert code == 1
    assert "do not start" not in err
    assert "\nEdit the settings of merge and rerun it with\n--from merge, or edit the gate" in err
    assert "\nmerge " in out


def test_a_gate_is_made_anew_with_other_settings(braid: Braid, config: Path, stopped: Path) -> None:
    edit = "stages.experts.gate.min_gain=-0.5"
    code, _, err = braid("run", config, *GATES, edit)
    assert code == 1
    assert "finished or started stages depend on it: gates.experts.sums\n" in err
    code, _, err = braid(
        "run", config, *GATES, edit, "--from", "gates.experts.sums", actions=FALLS_SHORT
    )
    assert (code, err) == (0, "")
    assert attempts(stopped)["experts.sums"] == 1


def test_a_warning_is_told_and_the_run_goes_on(braid: Braid, config: Path, runs: Path) -> None:
    warns = "stages.experts.gate.on_failure=warn"
    actions = {**FALLS_SHORT, "gates.merge": {"0": "draw_level"}}
    code, out, err = braid("run", config, *GATES, warns, actions=actions)
    assert (code, err) == (0, "")
    assert "[4/8] gates.experts.sums  warned: experts.sums gains -20.0 points" in out
    [_, (state, cause)] = events(runs / "small", "gates.merge")
    assert (state, cause.partition(":")[0]) == ("done", "warned")
    assert "merge solves 47.0 % of sums, experts.sums 50.0 %: -0.5 points" in cause


def test_a_reason_that_is_no_utf_8_is_told_as_far_as_it_can_be(braid: Braid, stopped: Path) -> None:
    given = (
        "gate",
        "override",
        "small",
        "gates.experts.sums",
        "--reason",
        "a b\udce4d \U0001f331 seed",
    )
    assert braid(*given)[0] == 0
    _, cause = events(stopped, "gates.experts.sums")[-1]
    assert cause.startswith("overridden: a b?d \U0001f331 seed; its verdict was: ")
    assert "a b?d \U0001f331 seed" in braid("status", "small")[1]


def test_an_override_is_recorded_and_the_run_goes_on(
    braid: Braid, config: Path, stopped: Path
) -> None:
    given = ("gate", "override", "small", "gates.experts.sums", "--reason", " a bad\n seed ")
    code, out, err = braid(*given)
    assert (code, err) == (0, "")
    assert out == f"gates.experts.sums is overridden; continue with: braid resume {stopped}\n"
    state, cause = events(stopped, "gates.experts.sums")[-1]
    assert state == "done"
    assert cause.startswith(f"overridden: a bad seed; its verdict was: {SAID}")
    assert (
        "gates.experts.sums is done: overridden: a bad seed; its verdict was: gate: "
        in braid("why", "small", "gates.experts.sums")[1]
    )
    assert (
        "after gates.experts.sums, which is done: overridden: " in braid("why", "small", "merge")[1]
    )
    assert "overridden: a bad seed" in " ".join(braid("status", "small")[1].split())
    code, out, err = braid("resume", "small")
    assert (code, err) == (0, "")
    assert "gates.experts.sums" not in out
    assert attempts(stopped)["gates.experts.sums"] == 1

    taken = braid("run", config, *GATES, "--name", "other", "--fork", "small", "--only", "merge")
    assert taken[0] == 0
    [(state, cause)] = events(stopped.with_name("other"), "gates.experts.sums")
    assert cause.startswith(f"reused from {stopped}: overridden: a bad seed; its verdict was: ")


def table(out: str, width: int = 130) -> tuple[dict[str, list[str]], str]:
    """Return the rows of a table by their stages, and the text below them."""
    rows, _, below = out.partition("\n\n")
    assert max(map(len, rows.splitlines()[1:])) < width
    return {cells(line)[0]: cells(line) for line in rows.splitlines()[1:]}, below


def test_a_status_has_room_for_a_verdict_in_a_word(braid: Braid, stopped: Path) -> None:
    rows, below = table(braid("status", "small")[1])
    assert rows["gates.experts.sums"][-1] == "stopped"
    [(_, cause)] = events(stopped, "gates.experts.sums")[-1:]
    assert below == f"gates.experts.sums: {cause}\n"
    braid("gate", "override", "small", "gates.experts.sums", "--reason", "why not")
    rows, below = table(braid("status", "small")[1])
    assert rows["gates.experts.sums"][-1] == "overridden"
    assert below.startswith("gates.experts.sums: overridden: why not; its verdict was: gate: ")
    assert braid("resume", "small", actions={"gates.merge": {"0": "draw_level"}})[0] == 0
    rows, below = table(braid("status", "small")[1].partition("\n\nmodel")[0])
    assert rows["gates.merge"][-1] == "warned"
    assert "gates.merge: warned: merge solves 47.0 % of sums" in below
    assert braid("resume", "small", "--from", "gates.merge")[0] == 0
    out = braid("status", "small")[1]
    assert table(out)[0]["gates.merge"][-1] == "passed"
    assert "gates.merge:" not in out


def test_a_long_cause_stands_below_the_table(braid: Braid, config: Path) -> None:
    assert braid("run", config, "--only", "cold_start")[0] == 0
    edits = (
        "stages.cold_start.optimizer.learning_rate=0.5",
        "stages.cold_start.loop.steps=3",
        "seed=7",
    )
    rows, below = table(braid("plan", config, *edits)[1], width=180)
    assert "…" in rows["cold_start"]
    assert below.startswith("cold_start: is refused: loop.steps was 2 and is now 3; ")
    assert "seed was 0 and is now 7\n" in below


@pytest.mark.parametrize(
    ("stage", "reason", "message"),
    [
        ("gates.experts.sums", " \n", "--reason must not be empty; it is recorded in the ledger"),
        (
            "gates.experts.sum",
            "why not",
            'has no stage gates.experts.sum; did you mean "gates.experts.sums"?',
        ),
        ("experts.sums", "why not", "experts.sums is not a gate of "),
        ("gates.merge", "why not", " is pending\nonly a gate that has stopped can be overridden"),
    ],
)
def test_a_wrong_override_changes_nothing(
    braid: Braid, stopped: Path, stage: str, reason: str, message: str
) -> None:
    before = (stopped / "ledger.jsonl").read_bytes()
    code, out, err = braid("gate", "override", "small", stage, "--reason", reason)
    assert (code, out) == (1, "")
    assert message in err
    assert (stopped / "ledger.jsonl").read_bytes() == before


def test_a_gate_is_overridden_once_and_as_long_as_it_holds(
    braid: Braid, config: Path, stopped: Path
) -> None:
    override = ("gate", "override", "small", "gates.experts.sums", "--reason", "why not")
    assert braid("gate", "override", "small", "gates.experts.sums")[0] == 2
    assert braid("run", config, *GATES, "--name", "alike", "--only", "cold_start")[0] == 0
    assert "is pending" in braid("gate", "override", "alike", *override[3:])[2]
    assert braid(*override)[0] == 0
    code, _, err = braid(*override)
    assert code == 1
    assert "gates.experts.sums of" in err
    assert "is done: overridden: why not; its verdict was: gate: " in err
    # Another expert is another question.
    assert braid("resume", "small", "--from", "experts.sums", actions=FALLS_SHORT)[0] == 1
    assert events(stopped, "gates.experts.sums")[-1][0] == "failed"


def test_a_gate_that_broke_has_not_stopped(braid: Braid, config: Path) -> None:
    assert braid("run", config, *GATES, actions={"gates.experts.sums": {"1": "break_down"}})[0] == 1
    code, _, err = braid("gate", "override", "small", "gates.experts.sums", "--reason", "why not")
    assert code == 1
    assert "is failed: rank 1 ended with exit status 3" in err
    assert braid("resume", "small")[0] == 0


def test_a_run_without_gates_says_so(braid: Braid, config: Path) -> None:
    braid("run", config, "--only", "cold_start")
    _, _, err = braid("gate", "override", "small", "merge", "--reason", "why not")
    assert err.endswith("; it has no gates\n")


def test_a_gate_made_anew_leaves_what_came_after_it(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config, *GATES)[0] == 0
    code, out, err = braid("resume", "small", "--from", "gates.experts.sums")
    assert (code, err) == (0, "")
    assert out.startswith(
        f"put aside {runs}/small/replaced/gates.experts.sums.1\n[4/8] gates.experts.sums"
    )
    assert attempts(runs / "small") == dict.fromkeys(attempts(runs / "small"), 1)
    assert "] merge" not in out


def test_a_gate_is_run_alone(braid: Braid, config: Path, runs: Path) -> None:
    code, _, err = braid("run", config, *GATES, "--only", "gates.experts.sums")
    assert code == 1
    assert "  gates.experts.sums needs experts.sums, which is pending\n" in err
    only = [each for name in ("cold_start", "experts.sums") for each in ("--only", name)]
    only = ("--only", "cold_start", "--only", "experts.sums")
    assert braid("run", config, *GATES, *only)[0] == 0
    assert braid("run", config, *GATES, "--only", "gates.experts.sums")[0] == 0
    assert attempts(runs / "small") == {"cold_start": 1, "experts.sums": 1, "gates.experts.sums": 1}


def test_a_gate_may_be_added_to_a_run_that_is_done(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config)[0] == 0
    code, out, err = braid("run", config, *GATES)
    assert (code, err) == (0, "")
    assert "[4/8] gates.experts.sums  passed: " in out
    assert set(attempts(runs / "small").values()) == {1}


@pytest.mark.parametrize("theirs", [(), GATES], ids=["never asked", "stopped since"])
def test_a_fork_takes_nothing_past_a_gate_that_is_not_open(
    braid: Braid, config: Path, runs: Path, theirs: tuple[str, ...]
) -> None:
    """In the other run the merge ran without the gate, or before the gate ran again."""
    assert braid("run", config, *theirs, "--name", "other")[0] == 0
    if theirs:
        again = braid("resume", "other", "--from", "gates.experts.sums", actions=FALLS_SHORT)
        assert again[0] == 1
        assert events(runs / "other", "merge")[-1][0] == "done"
    forked = ("run", config, *GATES, "--fork", "other")
    code, out, err = braid(*forked, actions=FALLS_SHORT)
    assert code == 1
    assert err.startswith(f"braid: {SAID}")
    reported = f"reused from {runs}/other: cold_start, experts.sums, experts.words\n"
    assert reported in out
    assert (
        "not reused: merge, since it waits for gates.experts.sums, which has to run first\n" in out
    )
    assert attempts(runs / "small") == {
        **dict.fromkeys(("cold_start", "experts.sums", "experts.words"), 0),
        "gates.experts.sums": 1,
    }
    assert braid("resume", "small")[0] == 1
    assert not (runs / "small" / "stages" / "merge").exists()
    # What is opened here opens it for what stands there.
    assert braid("gate", "override", "small", "gates.experts.sums", "--reason", "why not")[0] == 0
    code, out, _ = braid(*forked)
    assert code == 0
    assert f"reused from {runs}/other: merge" in out
    assert attempts(runs / "small")["merge"] == 0


def test_a_fork_asks_a_stricter_gate_anew(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config, *GATES, "--name", "other")[0] == 0
    stricter = "stages.experts.gate.min_gain=0.5"
    code, out, err = braid("run", config, *GATES, stricter, "--fork", "other")
    assert code == 1
    assert "must be at least stages.experts.gate.min_gain = +50.0" in err
    assert "not reused: merge, since it waits for gates.experts.sums" in out
    assert not (runs / "small" / "stages" / "merge").exists()


def test_a_fork_takes_an_open_gate_with_its_verdict(braid: Braid, config: Path, runs: Path) -> None:
    assert braid("run", config, *GATES, "--name", "other")[0] == 0
    code, out, err = braid("run", config, *GATES, "--fork", "other")
    assert (code, err) == (0, "")
    assert "left " not in out
    assert set(attempts(runs / "small").values()) == {0}
    [(state, cause)] = events(runs / "small", "gates.experts.sums")
    assert (state, "other: passed: experts.sums gains" in cause) == ("done", True)
    assert (runs / "small" / "stages" / "gates.experts.sums" / "verdict.json").exists()


def test_a_fork_takes_no_gate_whose_verdict_is_damaged(
    braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config, *GATES, "--name", "other")[0] == 0
    (runs / "other" / "stages" / "gates.experts.sums" / "verdict.json").write_text("{}")
    code, out, err = braid("run", config, *GATES, "--fork", "other")
    assert (code, err) == (0, "")
    assert "not reused: merge, since it waits for gates.experts.sums" in out
    assert attempts(runs / "small")["gates.experts.sums"] == 1


def test_a_plan_shows_gates(braid: Braid, config: Path) -> None:
    lines = [" ".join(cells(each)) for each in braid("plan", config, *GATES)[1].splitlines()]
    assert "gates.experts.sums gate experts.sums against cold_start yes pending starts ?" in lines
    assert (
        "gates.merge gate merge against experts.sums, experts.words yes pending starts ?" in lines
    )
    drawn = [line.strip() for line in braid("plan", config, *GATES, "--dot")[1].splitlines()]
    assert '"gates.experts.sums" -> "merge" [style=bold, label=gate];' in drawn
    assert '"gates.merge" -> "export" [style=bold, label=gate];' in drawn
    assert '"experts.sums" -> "gates.experts.sums" [style=dotted];' in drawn
    assert any(line.startswith('"gates.experts.sums" [') and "diamond" in line for line in drawn)
    assert braid("plan", config, *GATES, "--memory")[0] == 0


NONSENSE = {
    "no JSON": "not JSON",
    "[" * 100_000: "not JSON",
    "\xff": "not JSON",
    "null": "not an outcome (passed, warned, stopped) with its reasons",
    "NaN": "not an outcome",
    '{"outcome": "passed"}': "not an outcome",
    '{"outcome": "fine", "reasons": ["a"]}': "not an outcome",
    '{"outcome": ["passed"], "reasons": ["a"]}': "not an outcome",
    '{"outcome": "passed", "reasons": [NaN, 3]}': "not an outcome",
    '{"outcome": "passed", "reasons": "all"}': "not an outcome",
    '{"outcome": "passed", "reasons": []}': "not an outcome",
}


@pytest.mark.parametrize("text", NONSENSE)
def test_a_damaged_verdict_is_reported_and_the_gate_runs_again(
    text: str, braid: Braid, config: Path, stopped: Path
) -> None:
    verdict = stopped / "stages" / "gates.experts.sums" / "verdict.json"
    sound = verdict.read_bytes()
    verdict.write_bytes(text.encode("latin-1"))
    message = f"{verdict}: damaged: {NONSENSE[text]}"
    for command in (("why", "small", "gates.experts.sums"), ("status", "small")):
        code, out, err = braid(*command)
        assert (code, err) == (0, "")
        assert message.replace(" ", "") in "".join(out.split()) or command[0] == "status"
        assert "pending" in out
    assert (
        " done "
        not in braid("status", "small")[1].partition("gates.experts.sums")[2].splitlines()[0]
    )
    code, out, err = braid("plan", config, *GATES)
    assert (code, err) == (0, "")
    code, _, err = braid("gate", "override", "small", "gates.experts.sums", "--reason", "why not")
    assert code == 1
    assert message in err
    assert "; the gate runs again\n" in err
    assert braid("resume", "small", actions=FALLS_SHORT)[0] == 1
    assert attempts(stopped)["gates.experts.sums"] == 2
    assert verdict.read_bytes() == sound


def test_a_gate_whose_verdict_was_damaged_has_not_passed(
    braid: Braid, config: Path, runs: Path
) -> None:
    assert braid("run", config, *GATES)[0] == 0
    (runs / "small/stages/gates.experts.sums/verdict.json").write_text("{}")
    assert braid("status")[1] == "small: 7 done, 1 pending\n"
    assert braid("resume", "small")[0] == 0
    assert attempts(runs / "small")["gates.experts.sums"] == 2
    assert braid("status")[1] == "small: 8 done\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("5", "not a JSON object"),
        ("null", "not a JSON object"),
        ('["kl"]', "not a JSON object"),
        ('{"kl": ', "Expecting value"),
        ('{"step": 3, "time": 1.0, "kl": "0.1"}', "kl must be a number"),
        ('{"step": 3, "time": 1.0, "kl": null}', "kl must be a number"),
        ('{"step": 3.5, "time": 1.0}', "step must be an integer"),
        ('{"step": 3}', "missing time"),
        ("[" * 100_000, "maximum recursion depth"),
    ],
)
def test_a_damaged_line_of_metrics_is_named_by_the_gate_that_reads_it(
    line: str, why: str, braid: Braid, config: Path, runs: Path
) -> None:
    only = ("--only", "cold_start", "--only", "experts.sums")
    assert braid("run", config, *GATES, *only)[0] == 0
    metrics = runs / "small/stages/experts.sums/metrics.jsonl"
    with metrics.open("a") as file:
        file.write(f"{line}\n")
    code, _, err = braid("resume", "small")
    assert code == 1
    assert f"{metrics}:3: damaged, and a gate reads it: {why}" in err


def test_a_damaged_verdict_takes_no_override_back(braid: Braid, stopped: Path) -> None:
    braid("gate", "override", "small", "gates.experts.sums", "--reason", "why not")
    (stopped / "stages/gates.experts.sums/verdict.json").write_text("{}")
    assert (
        "gates.experts.sums is done: overridden: why not"
        in braid("why", "small", "gates.experts.sums")[1]
    )


def test_a_plan_starts_nothing_that_a_stopped_gate_holds(
    braid: Braid, config: Path, stopped: Path
) -> None:
    _, out, _ = braid("plan", config, *GATES)
    rows = {cells(line)[0]: line for line in out.splitlines() if cells(line)}
    for name in ("merge", "gates.merge", "evaluate", "export"):
        assert rows[name].endswith(" pending  waits for gates.experts.sums")
    assert "nothing more can start: stopped by gates.experts.sums; " in out
    _, out, _ = braid("run", config, *GATES, "--dry-run")
    assert "no command: nothing" in out
