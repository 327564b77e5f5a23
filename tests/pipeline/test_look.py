"""`braid look`: a run's health and curves, and the samples that a person asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from time import time

import pyarrow
import pyarrow.parquet as parquet
import pytest

from pipeline.commands.support.runs import read_run
from pipeline.report.view.health import judged
from pipeline.report.view.overview import sparkline
from pipeline.run.directory import RunDirectory
from pipeline.run.run import StageState
from stages.sampling.recording import LOADS
from stages.sampling.sample_files import COLUMNS, samples_file, write_samples, write_table
from stages.settings import RunSettings
from tests.pipeline.measured_runs import Measured, keys, write_run
from tests.pipeline.recorded_runs import HEALTHY, STAGE, Line, log, sample
from tests.pipeline.recorded_runs import measured as measured  # fixtures
from tests.pipeline.recorded_runs import recorded as recorded
from tests.pipeline.recorded_runs import small as small

Braid = Callable[..., tuple[int, str, str]]


def found(braid: Braid, *arguments: str) -> list[tuple[int, str]]:
    """Return the step and the prompt of the samples that the command finds."""
    code, out, err = braid("look", "small", STAGE, *arguments, "--count", "99", "--json")
    assert code == 0, err
    return [(each["step"], each["prompt"]) for each in json.loads(out)["samples"]]


def printed(braid: Braid, *arguments: str) -> str:
    code, out, err = braid("look", "small", *arguments)
    assert code == 0, err
    return out


def refused(braid: Braid, *arguments: str) -> str:
    code, out, err = braid("look", "small", *arguments)
    assert (code, out) == (1, "")
    return err


@pytest.mark.usefixtures("small")
def test_a_healthy_run_has_a_curve_for_each_stage(braid: Braid) -> None:
    out = printed(braid)
    health, verdict, _, title, headings, *rows = out.splitlines()
    assert health == "✓ nothing is out of its range"
    assert verdict.startswith(f"✓ {STAGE} learns: reward 0.313 → 0.7 over 30 steps, +0.39 (95 %: ")
    assert title == "small: seed 0"
    assert headings.split("  ")[0] == "stage"
    [row] = [row for row in rows if STAGE in row]
    assert "30/30" in row
    # Means of the first and the last quarter: two single steps are noise.
    assert "reward 0.353 → 0.66" in row
    assert " 100 " in row  # tokens a second
    assert "rollout 75 % · train 25 %" in row


def test_a_change_within_the_noise_is_called_so(small: Path, braid: Braid) -> None:
    log(small, [{**HEALTHY, "reward": (0.2, 0.5)[step % 2]} for step in range(40)])
    [row] = [row for row in printed(braid).splitlines() if f"─ {STAGE}" in row]
    assert "reward 0.35 → 0.35, within noise" in row


def test_an_evaluation_s_row_shows_its_outcome(small: Path, braid: Braid) -> None:
    accuracies = {"cold_start": (0.2, 0.4), "merge": (0.6, 0.5)}
    cells = [
        {"model": model, "domain": domain, "accuracy": accuracy}
        for model, both in accuracies.items()
        for domain, accuracy in zip(("sums", "words"), both, strict=True)
    ]
    lines = [{"step": n, "steps": 4, "time": float(n), **cell} for n, cell in enumerate(cells, 1)]
    path = small / "stages" / "evaluate" / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [row] = [row for row in printed(braid).splitlines() if row.startswith("evaluate")]
    assert "best +40.0: merge on sums" in row
    path.write_text(json.dumps(lines[0]) + "\n")
    assert "1 model x 1 domain" in printed(braid)
    path.write_text(json.dumps({"step": 1, "time": 1.0, "accuracy": 0.5}) + "\n")  # damaged
    assert "0 models x 0 domains" in printed(braid)


def test_the_start_of_the_engines_is_no_weight_sync(small: Path, braid: Braid) -> None:
    started = {**HEALTHY, "seconds_refit": 50.0, "seconds_start": 48.0}
    log(small, [started] + [{**HEALTHY, "seconds_refit": 0.0}] * 29)
    [row] = [row for row in printed(braid).splitlines() if f"─ {STAGE}" in row]
    assert "rollout 53 % · engine start 28 % · train 18 %" in row  # refit is 1 %


FAULTS: dict[str, tuple[Line, str]] = {
    "nothing right": (
        {"all_wrong": 1.0, "zero_variance": 1.0, "all_right": 0.0},
        "cannot learn: no response to 100% of the prompts is right",
    ),
    "entropy": ({"entropy": 0.001}, "does harm: entropy is 0.001, below 0.02 for 8 steps"),
    "truncation": ({"unfinished": 0.5}, "cannot learn: unfinished is 0.5, above 0.25 for 8 steps"),
    "no signal": ({"zero_variance": 1.0}, "cannot learn: zero_variance is 1, above 0.9"),
    "rewards": ({"reward_failures": 3}, "rewards fail on 2.4 samples a step"),
    "engines": ({"engine_restarts": 1}, "engines are lost, 0.8 a step"),
    "dead experts": ({"load_balance": 3.5}, "does harm: few experts work: load_balance is 3"),
    "idle experts": (
        {"idle_experts": 0.7},
        "does harm: few experts work: no recorded token chose 70%",
    ),
    "routers": ({"router_agreement": 0.5}, "does harm: engine and trainer choose other experts"),
    "mismatch": ({"high_ratio": 0.5}, "does harm: high_ratio is 0.5"),
    "drift": ({"drift_high_ratio": 0.9}, "does harm: drift_high_ratio is 0.9"),
    "stale": ({"dropped_stale": 60.0}, "dropped_stale is 60"),
    "hacked": ({"format_gain": 0.9}, "does harm: format_gain is 0.9"),
    "gradient": ({"gradient_norm": 50.0}, "the gradient's norm jumped to 50, 50 times its median"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_remedy(fault: str, small: Path, braid: Braid) -> None:
    worse, said = FAULTS[fault]
    log(small, [HEALTHY] * 22 + [{**HEALTHY, **worse}] * 8)
    first, *_ = printed(braid).splitlines()
    assert f" {STAGE}: {said}" in first
    [only] = json.loads(printed(braid, "--json"))["health"]
    assert only["stage"] == STAGE
    assert only["remedy"]
    assert only["alarm"] == (fault != "gradient") == first.startswith("! ")


def test_a_run_that_a_nan_stopped_is_shown(small: Path, braid: Braid) -> None:
    nan = {**HEALTHY, "reward": float("nan"), "gradient_norm": float("inf")}
    log(small, [HEALTHY] * 12 + [nan])
    assert "reward 0.362 → nan" in printed(braid)
    assert "nan" in printed(braid, "--metric", "reward")


def test_a_gradient_that_was_mostly_zero_is_no_error(small: Path, braid: Braid) -> None:
    log(small, [{**HEALTHY, "gradient_norm": 0.0}] * 20 + [HEALTHY])
    assert json.loads(printed(braid, "--json"))["health"] == []


def test_little_variety_is_no_fault_of_a_solved_domain(small: Path, braid: Braid) -> None:
    alike = {**HEALTHY, "similar_responses": 0.98, "entropy": 0.01, "zero_variance": 0.95}
    log(small, [{**alike, "all_right": 0.4}] * 30)
    assert len(json.loads(printed(braid, "--json"))["health"]) == 3
    log(small, [{**alike, "all_right": 0.6}] * 30)
    assert json.loads(printed(braid, "--json"))["health"] == []


def test_a_guard_that_fired_earlier_is_advice(small: Path, braid: Braid) -> None:
    log(small, [{**HEALTHY, "entropy": 0.001}] * 20 + [HEALTHY] * 10)
    [found] = json.loads(printed(braid, "--json"))["health"]
    assert not found["alarm"]
    assert found["what"].startswith("entropy was below 0.02 for 5 steps or more, last at step 20")
    log(small, [{**HEALTHY, "entropy": 0.001}] * 4 + [HEALTHY] * 10)  # less than its patience
    assert json.loads(printed(braid, "--json"))["health"] == []


def test_a_running_stage_without_a_new_step_is_named(small: Path) -> None:
    run = read_run(RunDirectory(small))
    for seconds, pace, named in (
        (130, 1, True),
        (110, 1, False),
        (190, 10, False),
        (210, 10, True),
    ):
        times = [time() - seconds - pace * back for back in (2, 1, 0)]
        lines = {STAGE: [{**HEALTHY, "step": n, "time": when} for n, when in enumerate(times)]}
        states = {**run.states, STAGE: StageState("running")}
        found = [each.what for each in judged(run, states, lines, {}).symptoms]
        assert [f"no step for {seconds} s" in each for each in found] == [True] * named
    assert not judged(run, run.states, lines, {}).symptoms  # it is done


def test_a_failed_stage_comes_before_advice(
    small: Path, braid: Braid, settings: RunSettings
) -> None:
    log(small, [HEALTHY] * 29 + [{**HEALTHY, "gradient_norm": 99.0}])
    with (small / "ledger.jsonl").open("a") as ledger:
        event = {"time": 1.0, "stage": "merge", "state": "failed", "cause": "no memory"}
        ledger.write(json.dumps({**event, "attempt": 2, "seconds": 1.0}) + "\n")
    (small / "stages" / "merge" / "manifest.json").unlink()
    health = json.loads(printed(braid, "--json"))["health"]
    assert health[-1]["stage"] == STAGE and not health[-1]["alarm"]
    assert health[0]["alarm"]


def test_a_run_is_followed_until_nothing_runs(
    small: Path, braid: Braid, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = iter([True] * 2)
    now = property(lambda _: next(running, False))
    monkeypatch.setattr("pipeline.report.view.overview.Overview.is_running", now)
    monkeypatch.setattr("pipeline.commands.look.time.sleep", lambda _: log(small, [HEALTHY] * 31))
    out = printed(braid, "--follow")
    assert out.count("✓ nothing is out of its range") == 2
    assert out.index("30/30") < out.index("31/31")
    assert "--follow is about the whole run" in refused(braid, STAGE, "--follow")


@pytest.mark.usefixtures("recorded")
def test_samples_are_found_by_what_is_asked(braid: Braid) -> None:
    assert len(found(braid)) == 8
    assert found(braid, "--step", "2") == [(2, "a"), (2, "d")]
    assert found(braid, "--step", "1", "--step", "3", "--reward", "1") == [(3, "a"), (1, "b")]
    assert found(braid, "--worst")[:2] == [(3, "c"), (3, "b")]
    assert (2, "d") not in found(braid, "--worst")  # it has no reward
    assert found(braid, "--longest")[0] == (1, "c")
    assert found(braid, "--flipped") == [(1, "a"), (3, "a"), (1, "b"), (3, "b")]
    assert found(braid, "--grep", r"^c\?") == [(3, "c"), (1, "c")]
    assert found(braid, "--reward", "exact=-1") == [(3, "c")]
    assert found(braid, "--reward", "brief=0.5", "--step", "2") == [(2, "a"), (2, "d")]
    assert found(braid, "--domain", "sums", "--prompt", sha256(b"b").hexdigest()[:12]) == [
        (3, "b"),
        (1, "b"),
    ]
    assert found(braid, "--grep", "nowhere") == []
    assert "none of 8 samples is like that" in printed(braid, STAGE, "--grep", "nowhere")
    assert len(found(braid, "--finish", "stop")) == 8


def test_the_newest_come_first_and_of_every_prompt_one_before_a_second(
    recorded: Path, braid: Braid
) -> None:
    rows = [sample(4, name, 0, group=place // 2) for place, name in enumerate("xxyy")]
    write_samples(samples_file(recorded / "stages" / STAGE / "rollouts", 4), rows)
    assert [prompt for _, prompt in found(braid)[:5]] == ["x", "y", "x", "y", "a"]


def test_a_sample_is_printed_with_what_was_recorded(recorded: Path, braid: Braid) -> None:
    whole = sample(
        4,
        "x",
        0.0,
        reward_messages={"exact": "expected\n4"},
        staleness=2,
        finish_reason="length",
        trainer_logprobs=[-1.5, 0.0],
        entropies=[0.25, 0.0],
        learned=[0],
        response="\x1b[31m",
    )
    path = samples_file(recorded / "stages" / STAGE / "rollouts", 4)
    write_samples(path, [whole])
    out = printed(braid, STAGE, "--step", "4", "--tokens")
    key = sha256(b"x").hexdigest()[:12]
    assert out.splitlines() == [
        f"step 4 · group 0 · sums · problem {key} · 2 tokens, truncated · 2 steps old",
        "  reward    0 (exact 0, brief 0.5), advantage -0.5",
        "            exact: expected",
        "4",
        "  prompt    x",
        r"  response  \x1b[31m",
        "   token  engine  trainer  difference  entropy  advantage",
        "0  '0'        -1     -1.5        -0.5     0.25       -0.5",
        "1  '1'        -2                                     -0.5",
        "",
        "1 of 1 samples",
    ]
    assert "3 of 9 samples; --count 9 shows all" in printed(braid, STAGE, "--count", "3")


def test_answers_of_an_evaluation_are_by_model(small: Path, braid: Braid) -> None:
    for model, reward in (("merge", 1.0), ("%2Felsewhere%2Fbase", 0.0)):
        path = small / "stages" / "evaluate" / "samples" / model / "sums_000000.parquet"
        write_samples(path, [sample(0, "a", reward)])
    out = printed(braid, "evaluate", "--model", "/elsewhere/base")
    assert out.startswith("/elsewhere/base · sums · problem ")
    assert "1 of 1 samples" in out
    assert "known: " in refused(braid, "evaluate", "--model", "nobody")


VERSUS = ("--model", "cold_start", "--versus", "merge")


@pytest.mark.usefixtures("measured")
def test_two_models_are_compared_on_the_problems_of_both(braid: Braid) -> None:
    table, _, rest = printed(braid, *VERSUS, "--count", "1").partition("\n\n")
    headings, *rows = table.splitlines()
    assert headings.split("  ")[-4:] == ["only cold_start", "only merge", "neither", "McNemar's p"]
    assert [row.split() for row in rows] == [
        ["sums", "1", "1", "7", "1", "0.07"],  # 2 * (1 + 8) / 2^8
        ["words", "5", "0", "0", "5", "1"],
        ["all", "6", "1", "7", "6", "0.07"],
    ]
    assert [line.partition(" ·")[0] for line in rest.splitlines() if " · " in line] == [
        *("cold_start", "merge"),
    ]
    assert "cold_start 1?" in rest and "merge 1?" in rest
    assert rest.splitlines()[-1] == "1 of 8 problems"
    document = json.loads(printed(braid, *VERSUS, "--json"))
    assert document["domains"]["sums"]["only_first"] == ["sums 1"]
    assert document["domains"]["sums"]["p_value"] == pytest.approx(18 / 256)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("solved_by", "count"), [("model", 1), ("versus", 7), ("both", 1), ("neither", 1)]
)
def test_the_answers_to_one_kind_of_problems_are_shown(
    solved_by: str, count: int, braid: Braid
) -> None:
    out = printed(braid, *VERSUS, "--domain", "sums", "--solved-by", solved_by)
    assert out.splitlines()[-1] == f"{min(count, 5)} of {count} problems"
    assert "words" not in out


def test_an_answer_that_was_not_recorded_is_said_so(measured: Path, braid: Braid) -> None:
    out = printed(braid, *VERSUS, "--domain", "words", "--solved-by", "both", "--count", "1")
    assert out.count("its answer was not recorded") == 2


def test_a_model_of_another_run_is_compared(
    measured: Path, runs: Path, settings: RunSettings, braid: Braid
) -> None:
    other = settings.model_copy(update={"name": "other"})
    right = {"merge": {"sums": [1] * 5}}
    write_run(runs / "other", other, Measured(right, keys(("sums",), 5, first=8)))
    asked = ("--model", "merge", "--versus", "other/merge")
    document = json.loads(printed(braid, *asked, "--json"))
    assert document["domains"]["sums"]["only_second"] == ["sums 9"]  # of two in common
    assert document["domains"].keys() == {"sums"}
    assert "not measured on words" in refused(braid, *asked, "--domain", "words")
    assert "has been measured; " in refused(braid, "--model", "merge", "--versus", "nobody")
    assert "name both" in refused(braid, "--versus", "merge")


@pytest.mark.usefixtures("small")
def test_a_metric_is_shown_of_every_stage_and_domain(small: Path, braid: Braid) -> None:
    log(small, [{**HEALTHY, "kl": 0.25 * step} for step in range(1, 13)])
    lines = [{"step": 1, "time": 1.0, "kl/sums": 0.5, "kl/words": 2.0}]
    path = small / "stages" / "merge" / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    headings, *rows = printed(braid, "--metric", "kl").splitlines()
    assert headings.split()[-3:] == ["the", "last", "10"]
    assert [row.split()[0:2] + row.split()[3:] for row in rows] == [
        [STAGE, "kl", "0.25", "1.875"],  # the mean of 0.75 to 3
        ["merge", "kl/sums", "0.5", "0.5"],
        ["merge", "kl/words", "2", "2"],
    ]
    [first, *_] = json.loads(printed(braid, "--metric", "kl", "--json"))["metric"]
    assert (first["stage"], first["values"][:2]) == (STAGE, [0.25, 0.5])
    assert "no stage has logged kll; did you mean" in refused(braid, "--metric", "kll")


def test_the_experts_that_a_domain_uses_most_are_shown(small: Path, braid: Braid) -> None:
    assert "has recorded no experts" in refused(braid, "merge", "--experts")
    assert "name a STAGE" in refused(braid, "--experts")
    for step in (1, 2):
        rows = [
            {"step": step, "domain": "sums", "layer": 0, "slots": [6, 2, 0, 0]},
            {"step": step, "domain": "words", "layer": 0, "slots": [2, 2, 2, 2]},
        ]
        write_table(small / "stages" / "merge" / "routing" / f"step_{step}.parquet", rows, LOADS)
    assert [row.split() for row in printed(braid, "merge", "--experts").splitlines()[2:]] == [
        ["sums", "0", "0", "3.00"]  # three quarters of its slots against one
    ]
    found = json.loads(printed(braid, "merge", "--experts", "--json"))["experts"]
    assert found == {"sums": [[0, 0, 3.0]], "words": []}
    alike = [{"step": 1, "domain": "sums", "layer": 0, "slots": [2, 2, 2, 2]}]
    write_table(small / "stages" / STAGE / "routing" / "step_1.parquet", alike, LOADS)
    assert printed(braid, STAGE, "--experts") == (
        f"{STAGE}: its 1 domain uses no expert twice as much as an equal share\n"
    )


def test_what_is_not_there_is_said(recorded: Path, braid: Braid) -> None:
    assert "no samples of step 9; there are some from 1 to 3" in refused(
        braid, STAGE, "--step", "9"
    )
    assert "no samples of domain words" in refused(braid, STAGE, "--domain", "words")
    assert "no samples of finish_reason length" in refused(braid, STAGE, "--finish", "length")
    assert "no sample has a reward right" in refused(braid, STAGE, "--reward", "right=1")
    assert "no recorded samples" in refused(braid, "merge")
    assert "--grep is about samples: name a STAGE" in refused(braid, "--grep", "x")
    assert "--worst is about samples: name a STAGE" in refused(braid, "--worst")
    assert "--domain does not go with --experts" in refused(
        braid, STAGE, "--experts", "--domain", "sums"
    )
    assert "--versus is about the whole run" in refused(
        braid, STAGE, "--model", "merge", "--versus", "cold_start"
    )
    code, _, err = braid("look", "small", "--waits", "--metric", "kl")
    assert code == 2 and "not allowed with" in err
    code, _, err = braid("look", "small", STAGE, "--reward", "exact")
    assert code == 2 and "is not SCORE or NAME=SCORE" in err
    assert "no samples of step 99999999999;" in refused(braid, STAGE, "--step", "99999999999")
    assert "--follow prints again and again" in refused(braid, "--follow", "--json")
    assert "no stage has logged" in refused(braid, "--metric", "")


def test_a_damaged_file_is_named_and_the_others_are_shown(recorded: Path, braid: Braid) -> None:
    rollouts = recorded / "stages" / STAGE / "rollouts"
    paths = [samples_file(rollouts, step) for step in (1, 2, 3)]
    whole = paths[0].read_bytes()
    paths[0].write_bytes(whole[:100])
    strange = {"step": ["one"], "domain": ["sums"]}  # of another program
    parquet.write_table(pyarrow.table(strange), paths[1])
    code, out, err = braid("look", "small", STAGE, "--json")
    assert code == 0 and {each["step"] for each in json.loads(out)["samples"]} == {3}
    damaged = [line for line in err.splitlines() if "left out: " in line]
    assert ["step_000001.parquet: damaged" in damaged[0], "step_000002" in damaged[1]] == [True] * 2
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), paths[2])
    assert "step_000001.parquet: damaged" in refused(braid, STAGE)


def test_the_first_step_of_an_evaluation_is_found(small: Path, braid: Braid) -> None:
    path = small / "stages" / "evaluate" / "samples" / "merge" / "sums_000000.parquet"
    write_samples(path, [sample(0, "a", 1.0)])
    assert "1 of 1 samples" in printed(braid, "evaluate", "--step", "0")


def test_a_metric_that_is_never_finite_is_shown(small: Path, braid: Braid) -> None:
    log(small, [{**HEALTHY, "reward": float("nan"), "entropy": float("inf")}] * 3)
    assert "reward nan → nan" in printed(braid)
    for options in ([], ["--metric", "reward"]):
        out = printed(braid, "--json", *options)
        json.loads(out, parse_constant=lambda name: pytest.fail(name))


def test_a_run_that_disappears_while_it_is_followed_is_said_so(
    small: Path, braid: Braid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.report.view.overview.Overview.is_running", True)
    monkeypatch.setattr(
        "pipeline.commands.look.time.sleep", lambda _: small.rename(small.with_name("elsewhere"))
    )
    code, _, err = braid("look", "small", "--follow")
    assert code == 1 and "small is gone" in err


def test_pandas_and_pyarrow_read_a_directory_of_samples(recorded: Path) -> None:
    table = parquet.read_table(recorded / "stages" / STAGE / "rollouts")
    assert table.column_names == list(COLUMNS)
    assert len(table) == 8
    assert pyarrow.types.is_map(table.schema.field("reward_parts").type)


def test_a_sparkline_spans_the_lowest_and_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0] * 50) == "▁" * 16
    assert sparkline([5.0]) == "▁"
    assert sparkline([float("nan")]) == sparkline([1.7e308, -1.7e308]) == ""
    assert len(sparkline([float(n) for n in range(1000)])) == 16
