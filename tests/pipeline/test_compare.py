"""`braid compare`: the models of runs on the same problems, in the whole output and in numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.validate import load
from pipeline.run.directory import RunDirectory
from pipeline.run.run import Run
from stages.settings import RunSettings
from stages.statistics import Answers, paired_difference, recovered_headroom
from tests.pipeline.measured_runs import Measured, Skill, answers, keys, write_run
from tests.pipeline.violations import MIXED

Braid = Callable[..., tuple[int, str, str]]

GOLDEN = Path(__file__).parent / "golden_comparison"
DOMAINS = ("sums", "words")
SKILLS = {
    "cold_start": {"sums": Skill(0.3), "words": Skill(0.4)},
    "experts.sums": {"sums": Skill(0.6), "words": Skill(0.25)},
    "experts.words": {"sums": Skill(0.3), "words": Skill(0.42)},
    "merge": {"sums": Skill(0.55), "words": Skill(0.5)},
}
RIGHT = answers(SKILLS)
MEASURED = Measured(RIGHT, keys(DOMAINS))
BAD = ("0", "-1", "1e308", "true", "null", '"a"', "[]", "NaN")  # samples of a problem


@pytest.fixture
def small(runs: Path, settings: RunSettings) -> Path:
    write_run(runs / "small", settings, MEASURED)
    return runs / "small"


@pytest.fixture
def write(runs: Path, config: Path) -> Callable[..., None]:
    """Return a function that writes one more run, of a configuration with overrides."""

    def written(name: str, measured: Measured, *overrides: str) -> None:
        write_run(runs / name, load(config, [*overrides, f"name={name}"]), measured)

    return written


def printed(braid: Braid, *arguments: str) -> str:
    code, out, err = braid("compare", *arguments)
    assert code == 0, err
    return out


def found(braid: Braid, *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(printed(braid, *arguments, "--json"))
    return document


def refused(braid: Braid, *arguments: str) -> str:
    code, out, err = braid("compare", *arguments)
    assert (code, out) == (1, "")
    return err


@pytest.mark.parametrize(("name", "options"), [("text", []), ("markdown", ["--markdown"])])
@pytest.mark.usefixtures("small")
def test_the_tables_are_golden(name: str, options: list[str], braid: Braid, runs: Path) -> None:
    """To renew them, remove both files and run this test twice."""
    out = printed(braid, "small", *options)
    golden = GOLDEN / f"{name}.txt"
    if not golden.exists():
        golden.write_text(out)
        pytest.fail(f"wrote {golden}; read it")
    assert out == golden.read_text()
    assert name == "markdown" or max(map(len, out.splitlines())) <= 100


@pytest.mark.usefixtures("small")
def test_the_numbers_are_of_paired_answers(braid: Braid) -> None:
    document = found(braid, "small")
    assert document["start"] == "cold_start"
    assert document["experts"] == {"sums": "experts.sums", "words": "experts.words"}
    assert document["problems"] == {"sums": 200, "words": 200}
    models = document["models"]
    assert {name: each["role"] for name, each in models.items()} == {
        **{"cold_start": "start", "experts.sums": "expert", "experts.words": "expert"},
        "merge": "merge",
    }
    merge, start, expert = (
        Answers(RIGHT[name]["sums"]) for name in ("merge", "cold_start", "experts.sums")
    )
    score = models["merge"]["scores"]["sums"]
    assert score["accuracy"]["accuracy"] == sum(merge.right) / 200
    assert score["change"] == vars(paired_difference(merge, start))
    assert score["headroom"] == vars(recovered_headroom(merge, start, expert))
    assert models["merge"]["forgetting"] == {}
    assert models["experts.sums"]["forgetting"].keys() == {"words"}
    assert models["experts.sums"]["forgetting"]["words"]["high"] < 0
    assert models["cold_start"]["scores"]["sums"]["change"] is None
    costs = {each["stage"]: each for each in document["stages"]}
    assert costs["merge"]["sampled_tokens"] == 10_000
    assert costs["cold_start"]["sampled_tokens"] is None
    assert costs["cold_start"]["trained_tokens"] == 2000
    assert costs["merge"]["peak_bytes"] == 4 << 28


@pytest.mark.usefixtures("small")
def test_an_expert_without_a_significant_gain_has_no_headroom(braid: Braid) -> None:
    document = found(braid, "small")
    assert document["undefined"].keys() == {"words"}
    assert re.fullmatch(
        r"experts\.words gains \+\d\.\d points \(paired 95 %: -.* to .*\), not significant",
        document["undefined"]["words"],
    )
    assert document["models"]["merge"]["scores"]["words"]["headroom"] is None
    assert document["models"]["merge"]["mean_headroom"] == pytest.approx(
        document["models"]["merge"]["scores"]["sums"]["headroom"]
    )


def test_without_any_headroom_the_reasons_are_a_paragraph(
    braid: Braid, write: Callable[..., None]
) -> None:
    write("flat", Measured(answers(dict.fromkeys(SKILLS, SKILLS["merge"])), keys(DOMAINS)))
    for options, mark in (([], ""), (["--markdown"], "- ")):
        out = printed(braid, "flat", *options)
        gap = "\n" * (1 + len(options))
        assert f"\n\nno headroom on any domain{gap}{mark}no headroom on sums: experts.s" in out
        assert f"\n{mark}no headroom on words: experts.words gains" in out
        assert "on GPU" not in out


@pytest.mark.parametrize("options", [[], ["--markdown"]])
def test_memory_on_gpus_is_a_column_where_there_is_any(
    options: list[str], braid: Braid, small: Path
) -> None:
    RunDirectory(small).stage("merge").memory(1).write_text('{"peak_gpu_bytes": 1073741824}')
    assert "on GPU" in printed(braid, "small", *options)


@pytest.mark.usefixtures("small")
def test_models_are_chosen_and_another_start(braid: Braid) -> None:
    document = found(braid, "small", "merge", "--start", "experts.words")
    assert list(document["models"]) == ["experts.words", "merge"]
    assert document["start"] == "experts.words"
    assert found(braid, "small", "--start", "experts.words", "merge") == document


@pytest.mark.usefixtures("small")
def test_another_run_is_compared_on_the_common_problems(
    braid: Braid, write: Callable[..., None]
) -> None:
    write("other", Measured(answers(SKILLS, seed=1), keys(DOMAINS, first=50)), "seed=7")
    document = found(braid, "small", "merge", "other/merge")
    assert document["problems"] == {"sums": 150, "words": 150}
    assert list(document["models"]) == ["cold_start", "merge", "other/merge"]
    assert document["models"]["other/merge"]["role"] == "baseline"
    mine = document["models"]["merge"]["scores"]["sums"]["accuracy"]["accuracy"]
    assert mine == sum(RIGHT["merge"]["sums"][50:]) / 150
    assert "sums: 150 of 200 problems, those that all of these models answered" in document["notes"]


@pytest.mark.usefixtures("small")
def test_an_older_evaluation_is_read_and_compared_within_its_run_alone(
    braid: Braid, write: Callable[..., None]
) -> None:
    write("old", replace(MEASURED, keys=None))
    assert found(braid, "old")["models"] == found(braid, "small")["models"]
    message = refused(braid, "small", "old/merge")
    assert "old: evaluate was written by an older version" in message
    assert message.endswith("--from evaluate\n")


@pytest.mark.usefixtures("small")
def test_runs_that_cannot_be_compared_are_refused(braid: Braid, write: Callable[..., None]) -> None:
    write("apart", Measured(RIGHT, keys(DOMAINS, first=500)))
    assert "sums: no problem in common of" in refused(braid, "small", "apart/merge")
    write("greedy", MEASURED, "evaluation.temperature=0")
    message = refused(braid, "small", "greedy/merge")
    assert "were not graded alike: evaluation.temperature is 1.0 and 0.0" in message
    write("short", MEASURED, "domains.sums.sampling.max_response_tokens=7")
    assert "domains.sums.sampling.max_response_tokens" in refused(braid, "small", "short/merge")
    assert "no run nowhere" in refused(braid, "small", "nowhere/merge")
    for named in (["apart/mrge"], ["mrge"], ["--start", "mrge"]):
        message = refused(braid, "small", *named)
        assert "no model mrge in " in message
        assert 'did you mean "merge"?' in message


def test_several_answers_to_a_problem(braid: Braid, write: Callable[..., None]) -> None:
    right = {
        model: {domain: [3 * each for each in counts] for domain, counts in of.items()}
        for model, of in RIGHT.items()
    }
    write("several", Measured(right, keys(DOMAINS), samples=4))
    score = found(braid, "several")["models"]["merge"]["scores"]["sums"]
    assert score["accuracy"]["accuracy"] == pytest.approx(0.75 * sum(RIGHT["merge"]["sums"]) / 200)


def test_merges_in_turn_start_from_what_the_first_starts_from(
    braid: Braid, write: Callable[..., None]
) -> None:
    again = "{kind: distill, from: merge, teachers: experts, optimizer: {learning_rate: 1e-3},"
    more = Measured({**RIGHT, "again": RIGHT["merge"]}, keys(DOMAINS))
    write("twice", more, f"stages={{again: {again} loop: {{steps: 2}}}}}}")
    document = found(braid, "twice")
    assert document["start"] == "cold_start"
    roles = {name: each["role"] for name, each in document["models"].items()}
    assert (roles["again"], roles["merge"]) == ("merge", "merge")


def test_the_start_is_no_expert(braid: Braid, write: Callable[..., None]) -> None:
    write("apart", MEASURED, "stages.merge=null", "stages.export=null")
    document = found(braid, "apart", "--start", "experts.sums")
    assert document["experts"] == {"words": "experts.words"}


def test_other_rewards_or_other_code_of_one_are_not_comparable(
    braid: Braid, write: Callable[..., None], tmp_path: Path
) -> None:
    def own(directory: str, value: float) -> str:
        path = tmp_path / directory
        path.mkdir()
        (path / "grading.py").write_text(f"def grade(problem, response):\n    return {value}\n")
        reward = f"{{kind: python, function: 'grading:grade', path: '{path}'}}"
        return f"domains.sums.rewards={{own: {reward}}}"

    write("small", MEASURED)
    write("one", MEASURED, own("one", 1.0))
    write("moved", MEASURED, own("moved", 1.0))
    write("changed", MEASURED, own("changed", 0.5))
    assert "were not graded alike: domains.sums.rewards." in refused(braid, "small", "one/merge")
    assert "one/merge" not in found(braid, "one", "moved/merge")["models"]  # the same code
    message = refused(braid, "one", "changed/merge")
    assert "were not graded alike: the code of domains.sums.rewards.own" in message


def test_a_run_without_a_merge(braid: Braid, write: Callable[..., None]) -> None:
    write("apart", MEASURED, "stages.merge=null", "stages.export=null")
    document = found(braid, "apart")
    assert document["start"] == "cold_start"
    assert document["experts"] == {"sums": "experts.sums", "words": "experts.words"}
    assert "merge" not in document["models"]


def test_a_partly_finished_evaluation(braid: Braid, write: Callable[..., None]) -> None:
    some = {name: RIGHT[name] for name in ("cold_start", "experts.sums")}
    write("part", Measured(some, keys(DOMAINS), unfinished=("evaluate",)))
    document = found(braid, "part")
    assert list(document["models"]) == ["cold_start", "experts.sums"]
    write("none", Measured({}, keys(DOMAINS), unfinished=("evaluate",)))
    message = refused(braid, "none")
    assert "no model has been measured: evaluate is failed: out of memory" in message
    assert "measure them with: braid resume" in message


def test_a_stale_evaluation(braid: Braid, small: Path) -> None:
    checkpoint = RunDirectory(small).stage("merge").path / "checkpoints" / "step_2"
    (checkpoint / "checksums.json").write_text('{"digest": "other", "files": {}}')
    message = refused(braid, "small")
    assert "evaluate is stale: the checkpoint of merge changed" in message
    assert message.endswith("--from evaluate\n")


def test_a_run_without_an_evaluation(braid: Braid, write: Callable[..., None]) -> None:
    write("blind", MEASURED, "stages.evaluate=null")
    message = refused(braid, "blind")
    assert "has no evaluation; add one to its stages: evaluate: {kind: evaluate}" in message


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("solved/merge.json", '{"sums": [2, 0], "words": [0, 1]}'),
        ("solved/merge.json", '{"sums": []}'),
        ("solved/merge.json", "[" * 100_000),
        ("models/merge.json", "7"),
        *(("models/merge.json", f'{{"sums": {{"samples_per_problem": {each}}}}}') for each in BAD),
        ("problems.json", '{"sums": ["a"]}'),
        ("problems.json", json.dumps({"sums": ["a"] * 200})),
        ("solved/merge.json", None),
    ],
)
def test_a_damaged_file_is_named(file: str, text: str | None, braid: Braid, small: Path) -> None:
    path = small / "stages" / "evaluate" / file
    path.unlink() if text is None else path.write_text(text)
    message = refused(braid, "small")
    state = "is missing" if text is None else "is damaged"
    assert f"evaluate/{file} {state}; rerun the evaluation with --from evaluate" in message


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e308"])
def test_costs_of_damaged_lines_are_not_known(value: str, braid: Braid, small: Path) -> None:
    merge = RunDirectory(small).stage("merge")
    line = f'{{"step": 1, "time": 1.0, "sampled_tokens": {value}}}\n'
    merge.metrics.write_text(line + line.replace('"step": 1', '"step": 2'))
    merge.memory(1).write_text(f'{{"peak_bytes": {"1e999" if value == "1e308" else value}}}')
    [cost] = [each for each in found(braid, "small")["stages"] if each["stage"] == "merge"]
    assert (cost["sampled_tokens"], cost["peak_bytes"]) == (None, None)
    assert "\nmerge " in printed(braid, "small")


@pytest.mark.usefixtures("small")
def test_of_several_teachers_the_one_with_the_largest_weight_is_the_expert(
    braid: Braid, write: Callable[..., None]
) -> None:
    weights = "{experts.words: 0.3, experts.sums: 0.7}"
    write("several", MEASURED, f"stages.merge.teachers={{sums: {weights}, words: experts.words}}")
    document = found(braid, "several")
    assert document["experts"] == {"sums": "experts.sums", "words": "experts.words"}
    assert document["models"] == found(braid, "small")["models"]


TWO_MERGES = """\
  soup: {kind: merge_weights, models: experts}
  several:
    kind: distill
    from: soup
    domains: [sums]
    teachers: {sums: {experts.sums: 0.7, merge: 0.3}}
    optimizer: {learning_rate: 1e-3}
    loop: {steps: 2}
"""


def test_of_several_merges_the_first_decides_the_start_and_the_experts(
    braid: Braid, write: Callable[..., None], config: Path
) -> None:
    config.write_text(config.read_text() + TWO_MERGES)
    skills = {
        **SKILLS,
        "soup": {"sums": Skill(0.5), "words": Skill(0.4)},
        "several": {"sums": Skill(0.58), "words": Skill(0.4)},
    }
    measured = Measured(answers(skills), keys(DOMAINS))
    write("two", measured)
    document = found(braid, "two")
    assert document["start"] == "cold_start"
    assert document["experts"] == {"sums": "experts.sums", "words": "experts.words"}
    assert document["undefined"].keys() == {"words"}
    models = document["models"]
    assert [name for name, each in models.items() if each["role"] == "merge"] == [
        "merge",
        "several",
    ]
    assert models["several"]["trained_on"] == models["soup"]["trained_on"] == list(DOMAINS)
    # A merge of weights alone starts from what its models have in common.
    write("soup", measured, "stages.several=null", "stages.merge.from=soup")
    assert found(braid, "soup")["start"] == "cold_start"
    # A merge is no expert of another merge.
    write("last", measured, "stages.several.teachers={sums: merge}")
    assert found(braid, "last")["experts"] == document["experts"]
    taught = "stages.merge.teachers={sums: soup, words: experts.words}"
    write("first", measured, taught)
    assert found(braid, "first")["experts"] == document["experts"]


def test_domains_beyond_the_width_continue_below(braid: Braid, runs: Path, config: Path) -> None:
    names = [f"domain_{number}" for number in range(9)]
    text = config.read_text()
    sums = text[text.index("  sums:") : text.index("  words:")]
    added = "".join(sums.replace("sums", name) for name in names)
    config.write_text(text.replace(text[text.index("  sums:") : text.index("stages:")], added))
    settings = load(config, ["name=wide"])
    skills = {
        "cold_start": dict.fromkeys(names, Skill(0.3)),
        "merge": dict.fromkeys(names, Skill(0.6)),
    }
    write_run(runs / "wide", settings, Measured(answers(skills), keys(names)))
    out = printed(braid, "wide")
    assert max(map(len, out.splitlines())) <= 100
    assert all(name in out for name in names)
    assert "no headroom on domain_8: none of its experts was measured" in out


def test_every_table_has_the_models_in_the_order_of_the_plan(
    braid: Braid, write: Callable[..., None], runs: Path
) -> None:
    """Not in the order of the evaluation's `models`, nor by role."""
    skills = {"mixed": SKILLS["merge"], **SKILLS}
    mixed = MIXED.replace("stages=", "stages.mixed=").replace("{mixed: ", "", 1)[:-1]
    config = runs.parent / "small.yaml"
    config.write_text(config.read_text().replace("  merge:\n", "  mixed: {}\n  merge:\n"))
    models = "[mixed, merge, experts.words, experts.sums, cold_start]"
    given = (mixed, f"stages.evaluate.models={models}", "stages.export.from=mixed")
    write("small", Measured(answers(skills), keys(DOMAINS)), *given)
    run = Run(runs / "small", load(runs / "small/run.yaml"))
    planned = [stage.name for stage in run.stages if stage.steps is not None]
    assert planned.index("mixed") < planned.index("merge")
    score = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 200}
    [evaluation] = [stage for stage in run.stages if stage.name == "evaluate"]
    measured = {name: {"sums": score} for name in evaluation.models}
    assert [*measured] != planned
    run.stage("evaluate").results.write_text(json.dumps({"models": measured}))
    assert [*run.write_results()] == planned
    run.results.write_text(json.dumps({"models": measured}))  # as an older version wrote it
    assert [*json.loads(braid("status", "small", "--json")[1])["results"]] == planned
    assert [*found(braid, "small")["models"]] == planned
    assert [*found(braid, "small", "merge", "mixed")["models"]] == ["cold_start", "mixed", "merge"]
