"""A gate's verdict: numbers in, a verdict with its reasons out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel.errors import UserError
from pipeline.config.validate import load
from pipeline.run.gates import Steps, judge_gain, judge_merge
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.run import GateVerdict
from pipeline.run.solved import solved_problems
from stages.directory import StageDirectory
from stages.guards.settings import GainGateSettings, MergeGateSettings
from stages.settings import RunSettings
from tests.pipeline.violations import MIXED, TRAINED, errors, extending
from tests.stages.unpaired import unpaired, wilson

GATES = ["stages.experts.gate={}", "stages.merge.gate={}"]
# The second expert starts from the first.
IN_A_ROW = (
    "stages={second: {kind: grpo, from: experts, domains: [words], as: experts.words, gate: {}}}",
    "stages.experts.domains=[sums]",
    "stages.merge.teachers={sums: experts.sums, words: experts.words}",
)
OF_SUMS = ("gates.experts.sums", "gates.merge")  # gates that ask problems of the domain


@pytest.fixture
def stages(config: Path) -> dict[str, Stage]:
    return {stage.name: stage for stage in compile_graph(load(config, GATES))}


def answers(after: int, before: int, both: int | None = None) -> tuple[list[int], list[int]]:
    """Return two models' answers to 500 problems, of which both solve `both`.

    By default about as many as of two models whose right answers have nothing to do with each
    other, so that the paired interval is the one of independent samples.
    """
    both = after * before // 500 if both is None else both
    one = [1] * after + [0] * (500 - after)
    other = [1] * both + [0] * (after - both) + [1] * (before - both)
    return one, other + [0] * (500 - len(other))


def independent(after: int, before: int, share: float = 1.0) -> tuple[float, float]:
    """Return the unpaired interval of after - share * before, of 500 problems each."""
    found = unpaired(wilson(after, 500), wilson(before, 500), share)
    return found.low, found.high


@pytest.fixture
def gain(stages: dict[str, Stage]) -> Callable[..., GateVerdict]:
    """The verdict on an expert of `after` right answers of 500, over a parent of `before`."""

    def judge(
        after: int, before: int, steps: Steps = (), both: int | None = None, **gate: Any
    ) -> GateVerdict:
        one, other = answers(after, before, both)
        solved = {"experts.sums": {"sums": one}, "cold_start": {"sums": other}}
        return judge_gain(stages["gates.experts.sums"], GainGateSettings(**gate), solved, steps)

    return judge


def test_a_gain_that_is_beyond_chance_passes(gain: Callable[..., GateVerdict]) -> None:
    verdict = gain(240, 160)
    said = "experts.sums gains +16.0 points (paired 95 %: +9.9 to +21.9) over cold_start on sums"
    assert verdict == GateVerdict("passed", (said,))
    assert verdict.text.startswith("passed: experts.sums gains")


def test_a_gain_that_could_be_chance_stops(gain: Callable[..., GateVerdict]) -> None:
    verdict = gain(166, 160)
    assert verdict.outcome == "stopped"
    assert verdict.text == (
        "gate: experts.sums gains +1.2 points (paired 95 %: -4.6 to +7.0) over cold_start on sums; "
        "the lower 95 % bound must be at least stages.experts.gate.min_gain = +0.0"
    )
    assert gain(166, 160, on_failure="warn").outcome == "warned"
    assert gain(160, 160).outcome == "stopped"


def test_the_lower_end_of_the_interval_decides(gain: Callable[..., GateVerdict]) -> None:
    low, _ = independent(250, 160)  # of 80 problems that both solve: no correlation
    assert gain(250, 160, min_gain=low).outcome == "passed"
    assert gain(250, 160, min_gain=math.nextafter(low, 1)).outcome == "stopped"
    assert gain(150, 160, min_gain=-0.1).outcome == "passed"


def test_a_gain_that_chance_could_give_independent_samples_passes_by_its_pairs(
    gain: Callable[..., GateVerdict],
) -> None:
    low, _ = independent(180, 160)
    assert low < 0
    verdict = gain(180, 160, both=150)
    assert verdict.outcome == "passed"
    assert verdict.reasons == (
        "experts.sums gains +4.0 points (paired 95 %: +1.5 to +6.5) over cold_start on sums",
    )
    assert gain(180, 160).outcome == "stopped"  # answers that have nothing in common


def test_a_gain_on_other_problems_than_the_parent_solves_needs_to_be_larger(
    gain: Callable[..., GateVerdict],
) -> None:
    low, _ = independent(276, 240)
    assert low > 0
    verdict = gain(276, 240, both=60)
    assert verdict.outcome == "stopped"
    assert verdict.text.startswith("gate: experts.sums gains +7.2 points (paired 95 %: -0.")


def test_only_the_last_steps_are_bounded(gain: Callable[..., GateVerdict]) -> None:
    steps = [{"mismatch_max": 1.0, "kl": 9.0}, *[{"mismatch_max": 2e-5, "kl": 0.01}] * 3]
    bounds = {"max_mismatch": 2e-5, "max_kl": 0.02}
    verdict = gain(240, 160, steps, window=3, **bounds)
    assert verdict.outcome == "passed"
    assert verdict.reasons[1:] == (
        "mismatch_max reaches 2e-05 in the last 3 steps of experts.sums",
        "kl is on average 0.01 in the last 3 steps of experts.sums",
    )
    verdict = gain(240, 160, steps, window=4, **bounds)
    assert verdict.outcome == "stopped"
    assert verdict.reasons == (
        "mismatch_max reaches 1 in the last 4 steps of experts.sums, above "
        "stages.experts.gate.max_mismatch = 2e-05",
        "kl is on average 2.26 in the last 4 steps of experts.sums, above "
        "stages.experts.gate.max_kl = 0.02",
    )


@pytest.mark.parametrize(
    ("bound", "metric", "within", "beyond"),
    [
        ("max_mismatch", "mismatch_max", [0.5, 0.2], 0.6),
        ("min_router_agreement", "router_agreement", [0.5, 0.7], 0.4),
        ("max_drift", "drift_high_ratio", [0.75, 0.25], 0.6),
        ("max_router_movement", "router_movement", [0.75, 0.25], 0.6),
        ("max_kl", "kl", [0.75, 0.25], 0.6),
    ],
)
def test_every_bound_holds_its_metric(
    gain: Callable[..., GateVerdict], bound: str, metric: str, within: list[float], beyond: float
) -> None:
    def outcome(*values: float) -> str:
        return gain(240, 160, [{metric: value} for value in values], **{bound: 0.5}).outcome

    assert outcome(*within) == "passed"
    assert outcome(*within, beyond) == "stopped"
    assert outcome(*within, math.nan) == "stopped"
    assert gain(240, 160, [{"loss": 0.0}], **{bound: 0.5}).text == (
        f"gate: {metric} is not logged in the last 1 steps of experts.sums, and "
        f"stages.experts.gate.{bound} bounds it"
    )


@pytest.fixture
def kept(stages: dict[str, Stage]) -> Callable[..., GateVerdict]:
    """Return the verdict on a merge with N right answers in a domain; teachers have 400."""

    def judge(sums: int, words: int, both: int | None = None, **gate: Any) -> GateVerdict:
        merge, teacher = {}, {}
        merge["sums"], teacher["sums"] = answers(sums, 400, both)
        merge["words"], teacher["words"] = answers(words, 400)
        solved = {
            "merge": merge,
            "experts.sums": {"sums": teacher["sums"]},
            "experts.words": {"words": teacher["words"]},
        }
        return judge_merge(stages["gates.merge"], MergeGateSettings(**gate), solved)

    return judge


def test_a_merge_that_keeps_enough_passes(kept: Callable[..., GateVerdict]) -> None:
    verdict = kept(380, 410)
    assert verdict == GateVerdict(
        "passed",
        (
            "merge solves 76.0 % of sums, experts.sums 80.0 %",
            "merge solves 82.0 % of words, experts.words 80.0 %",
        ),
    )


def test_a_merge_is_warned_of_below_the_bound_and_stops_where_that_is_no_chance(
    kept: Callable[..., GateVerdict],
) -> None:
    verdict = kept(379, 410)
    assert verdict.outcome == "warned"
    assert verdict.reasons == (
        "merge solves 75.8 % of sums, experts.sums 80.0 %: -0.2 points (paired 95 %: -5.2 to +4.8) "
        "from stages.merge.gate.min_kept = 0.95 of that",
    )
    sure = next(right for right in range(379, 0, -1) if kept(right, 400).outcome == "stopped")
    assert independent(sure, 400, 0.95)[1] < 0
    assert independent(sure + 1, 400, 0.95)[1] >= 0
    assert kept(sure, 379).text.count("stages.merge.gate.min_kept") == 2
    assert kept(sure, 400, on_failure="warn").outcome == "warned"


def test_a_loss_that_chance_could_give_independent_samples_stops_a_merge_by_its_pairs(
    kept: Callable[..., GateVerdict],
) -> None:
    assert independent(365, 400, 0.95)[1] > 0
    assert kept(365, 400, both=363).outcome == "stopped"
    assert kept(365, 400).outcome == "warned"


def test_a_loss_on_other_problems_than_the_teacher_solves_is_only_a_warning(
    kept: Callable[..., GateVerdict],
) -> None:
    assert independent(353, 400, 0.95)[1] < 0
    assert kept(353, 400, both=255).outcome == "warned"


def test_nothing_is_asked_of_a_merge_where_its_teacher_knows_nothing(
    stages: dict[str, Stage],
) -> None:
    nothing = dict.fromkeys(("sums", "words"), [0] * 500)
    solved = dict.fromkeys(("merge", "experts.sums", "experts.words"), nothing)
    assert judge_merge(stages["gates.merge"], MergeGateSettings(), solved).outcome == "passed"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("experts.sums", None),
        ("cold_start", "[1, 0, 1"),
        ("experts.sums", '{"words": [1, 0, 1]}'),
        ("experts.sums", '{"sums": []}'),
        ("cold_start", '{"sums": [1, 0]}'),
        ("cold_start", '{"sums": [1, 0, 2]}'),
    ],
    ids=["missing", "not JSON", "without the domain", "none", "fewer problems", "two answers"],
)
def test_a_gate_refuses_answers_that_make_no_pairs(
    stages: dict[str, Stage], tmp_path: Path, model: str, text: str | None
) -> None:
    directory, gate = StageDirectory(tmp_path), stages["gates.experts.sums"]
    directory.solved.mkdir()
    for each in gate.models:
        (directory.solved / f"{each}.json").write_text('{"sums": [1, 0, 1]}')
    sound = {"sums": [1, 0, 1]}
    assert solved_problems(directory, gate) == {"experts.sums": sound, "cold_start": sound}
    path = directory.solved / f"{model}.json"
    path.write_text(text) if text else path.unlink()
    with pytest.raises(
        UserError, match=rf"{model}\.json is .*; rerun .* --from gates\.experts\.sum"
    ):
        solved_problems(directory, gate)


def test_a_gate_with_several_answers_counts_them_all(
    stages: dict[str, Stage], tmp_path: Path
) -> None:
    """Two of three answers are more of the same problems than one of one."""
    directory, gate = StageDirectory(tmp_path), stages["gates.experts.sums"]
    directory.solved.mkdir()
    for model, right in (("experts.sums", 2), ("cold_start", 1)):
        right_answers = [right] * 400 + [0] * 100
        (directory.solved / f"{model}.json").write_text(json.dumps({"sums": right_answers}))
    solved = solved_problems(directory, gate, samples=3)
    verdict = judge_gain(gate, GainGateSettings(samples_per_problem=3), solved)
    assert verdict.reasons[0].startswith("experts.sums gains +26.7 points (paired 95 %: ")
    with pytest.raises(UserError, match="damaged"):
        solved_problems(directory, gate)  # of one answer two cannot be right


def names(settings: RunSettings) -> list[str]:
    return [stage.name for stage in compile_graph(settings)]


def test_gates_stand_between_the_stages(stages: dict[str, Stage]) -> None:
    assert list(stages) == [
        "cold_start",
        "experts.sums",
        "experts.words",
        "gates.experts.sums",
        "gates.experts.words",
        "merge",
        "gates.merge",
        "evaluate",
        "export",
    ]
    assert stages["merge"].after == ("gates.experts.sums", "gates.experts.words")
    assert stages["export"].after == ("gates.merge",)
    assert stages["evaluate"].after == stages["experts.words"].after == ()
    assert stages["gates.experts.sums"].inputs == ("experts.sums", "cold_start")
    assert stages["gates.experts.sums"].evaluated_on == {
        "experts.sums": ["sums"],
        "cold_start": ["sums"],
    }
    assert stages["gates.merge"].evaluated_on == {
        "merge": ["sums", "words"],
        "experts.sums": ["sums"],
        "experts.words": ["words"],
    }
    assert stages["gates.merge"].needs_engine
    assert not any("gates." in name for name in stages["evaluate"].models)


def test_the_gate_of_an_expert_comes_before_what_grows_from_it(config: Path) -> None:
    settings = load(config, [*GATES, *IN_A_ROW])
    stages = {stage.name: stage for stage in compile_graph(settings)}
    assert list(stages)[:6] == [
        "cold_start",
        "experts.sums",
        "gates.experts.sums",
        "experts.words",
        "gates.experts.words",
        "merge",
    ]
    assert stages["experts.words"].after == ("gates.experts.sums",)
    assert stages["gates.experts.words"].against == {"words": "experts.sums"}
    assert stages["merge"].after == ("gates.experts.sums", "gates.experts.words")
    for position, stage in enumerate(stages.values()):
        assert set(stage.waits_for) <= set(list(stages)[:position])


def test_gates_stand_between_rounds(config: Path) -> None:
    extending(config, "two-rounds", "cold_start", "merge", "merge_2")
    of_round_2 = ("stages.experts_2.gate={}", "stages.merge_2.gate={}")
    stages = {each.name: each for each in compile_graph(load(config, [*GATES, *of_round_2]))}
    assert stages["round_2.experts.sums"].after == ("gates.merge",)
    assert stages["gates.round_2.experts.sums"].against == {"sums": "merge"}
    assert stages["round_2.merge"].after == (
        "gates.merge",
        "gates.round_2.experts.sums",
        "gates.round_2.experts.words",
    )
    assert stages["gates.round_2.merge"].against == {
        "sums": "round_2.experts.sums",
        "words": "round_2.experts.words",
    }
    assert stages["export"].after == ("gates.round_2.merge",)
    for position, stage in enumerate(stages.values()):
        assert set(stage.waits_for) <= set(list(stages)[:position])


def test_a_gate_may_measure_some_of_the_domains(config: Path) -> None:
    some = ["stages.experts.gate={domains: [sums]}", "stages.merge.gate={domains: [words]}"]
    settings = load(config, some)
    stages = {stage.name: stage for stage in compile_graph(settings)}
    assert [name for name in stages if name.startswith("gates.")] == [
        "gates.experts.sums",
        "gates.merge",
    ]
    assert stages["merge"].after == ("gates.experts.sums",)
    assert stages["gates.merge"].evaluated_on == {"merge": ["words"], "experts.words": ["words"]}
    assert [settings.gate_problems(domain) for domain in settings.domains] == [500, 500]
    every = {stage.name: stage for stage in compile_graph(load(config, GATES))}
    assert every["gates.experts.sums"].reads == stages["gates.experts.sums"].reads


def test_a_gate_may_measure_a_cold_start_and_a_policy_of_several_domains(config: Path) -> None:
    first = f"stages={{first: {{kind: sft, {TRAINED[1:]}}}"
    gates = ("stages.cold_start.from=first", "stages.cold_start.gate={}", "stages.mixed.gate={}")
    stages = {each.name: each for each in compile_graph(load(config, [first, MIXED, *gates]))}
    assert stages["gates.cold_start"].against == {"sums": "first", "words": "first"}
    assert stages["experts.sums"].after == stages["mixed"].after == ("gates.cold_start",)
    assert stages["gates.mixed"].evaluated_on == {
        "mixed": ["sums", "words"],
        "cold_start": ["sums", "words"],
    }
    mixed, start = answers(240, 160)
    other_mixed, other_start = answers(160, 160)
    solved = {
        "mixed": {"sums": mixed, "words": other_mixed},
        "cold_start": {"sums": start, "words": other_start},
    }
    verdict = judge_gain(stages["gates.mixed"], GainGateSettings(), solved)
    assert verdict.outcome == "stopped"
    assert verdict.text == (
        "gate: mixed gains +0.0 points (paired 95 %: -5.8 to +5.8) over cold_start on words; "
        "the lower 95 % bound must be at least stages.mixed.gate.min_gain = +0.0"
    )


def test_without_gates_nothing_is_another_stage(config: Path, settings: RunSettings) -> None:
    with_gates = {stage.name: stage for stage in compile_graph(load(config, GATES))}
    for stage in compile_graph(settings):
        assert stage.reads == with_gates[stage.name].reads
        assert stage.after == ()
        assert not any(key.endswith(".gate") for key in stage.reads)


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("stages.experts.gate.min_gain=0.1", {"gates.experts.sums", "gates.experts.words"}),
        ("stages.experts.gate.problems=50", {"gates.experts.sums", "gates.experts.words"}),
        ("stages.experts.gate.domains=[words, sums]", set()),
        ("stages.merge.gate.min_kept=0.5", {"gates.merge"}),
        ("evaluation.problems=50", {"evaluate"}),
        *(
            (f"evaluation.{value}", {"evaluate", "gates.experts.words", *OF_SUMS})
            for value in ("temperature=0", "top_p=0.9", "top_k=20", "sampling_seed=3")
        ),
        ("domains.sums.evaluation.top_k=20", {"evaluate", *OF_SUMS}),
        ("domains.sums.sampling.max_response_tokens=20", {"experts.sums", "evaluate", *OF_SUMS}),
    ],
)
def test_a_change_of_a_gate_touches_it_alone(
    config: Path, override: str, changed: set[str]
) -> None:
    before, after = (compile_graph(load(config, each)) for each in (GATES, [*GATES, override]))
    pairs = zip(before, after, strict=True)
    assert {old.name for old, new in pairs if old.reads != new.reads} == changed


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.experts.gate.min_gian=0"], 'unknown key; did you mean "min_gain"?'),
        (["stages.experts.gate.problems=1"], "gate.problems: 1 is less than the 2 data-parallel"),
        (
            ["stages.merge.gate.problems=1"],
            "stages.merge.gate.problems: 1 is less than the 2 data-parallel",
        ),
        (["stages.experts.gate.max_kl=1"], "gate.max_kl: 1 limits a metric that is not logged"),
        (["stages.experts.gate.max_drift=1"], "gate.max_drift: 1 limits a metric that is not"),
        (
            ["stages.experts.gate.max_router_movement=1"],
            "is only logged with domains.sums.objective.ratio",
        ),
        (
            ["stages.experts.gate.min_router_agreement=1", "domains.sums.routing.replay=none"],
            "is not logged with domains.sums.routing.replay = none",
        ),
        (
            ["stages.merge.gate.min_kept=95"],
            "stages.merge.gate.min_kept: should be less than or equal to 1",
        ),
        (
            ["stages.merge.gate={}", "stages.export.as=gates.merge"],
            "stages.export: two stages would be named gates.merge, of this block and of "
            "stages.merge; rename a block, or set `as`",
        ),
        (
            ["stages.cold_start.gate={}"],
            "stages.cold_start.gate: it compares the stage with what that starts from, and "
            "stages.cold_start.from is null",
        ),
        (
            ["stages.experts.gate={domains: [sum]}"],
            'stages.experts.gate.domains: no such domain: sum; did you mean "sums"?',
        ),
        (
            ["stages.experts.gate={domains: []}"],
            "stages.experts.gate.domains: must name at least one domain; null is all",
        ),
        (
            ["stages.mixed.domains=[sums]", "stages.mixed.gate={domains: [words]}"],
            "stages.mixed.gate.domains: stages.mixed.domains leaves out words, so no gate would",
        ),
        (
            [
                f"stages={{first: {{kind: sft, {TRAINED[1:]}}}",
                "stages.cold_start.from=first",
                "stages.cold_start.gate.max_kl=1",
            ],
            "stages.cold_start.gate.max_kl: 1 limits a metric of rollouts; use null",
        ),
    ],
)
def test_a_gate_that_cannot_work_is_refused(
    config: Path, overrides: list[str], message: str
) -> None:
    assert message in "\n".join(errors(config, MIXED, *overrides))


def test_bounds_of_what_is_logged_are_taken(config: Path) -> None:
    overrides = [
        "stages.experts.gate={domains: [sums], max_kl: 1, max_drift: 1, max_router_movement: 1, "
        "min_router_agreement: 1}",
        "domains.sums.objective={kl: {coefficient: 0.1}, ratio: {name: rspo},"
        " correction: {level: sequence}}",
        "domains.sums.rollout.max_steps_ahead=1",
    ]
    gate = load(config, overrides).stages["experts"].gated
    assert gate == GainGateSettings(
        domains=("sums",), max_kl=1, max_drift=1, max_router_movement=1, min_router_agreement=1
    )


def test_the_cold_start_looks_for_as_many_problems_as_a_gate_wants(config: Path) -> None:
    gate = "stages.experts.gate={problems: 3000, domains: [sums]}"
    settings = load(config, [gate, "stages.merge.gate.problems=2500"])
    assert [settings.gate_problems(domain) for domain in settings.domains] == [3000, 2500]
    assert load(config).gate_problems("sums") == 0
