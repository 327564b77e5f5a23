"""The settings of a merge of weights: its rules, its inputs, and what makes it stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.validate import load
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.lineage import changes, lineage_from
from stages.kinds.kind import MODEL
from stages.kinds.merge_weights.settings import MergeWeightsSettings
from tests.pipeline.conftest import CONFIG, Braid
from tests.pipeline.violations import edited_copy, errors, violation, with_data

SOUP = {"kind": "merge_weights", "from": "cold_start", "models": "experts", "method": "ties"}
PAIR = "stages.soup.models={s: experts.sums, w: experts.words}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run with a merge of the weights of its experts."""
    path = tmp_path / "small.yaml"
    path.write_text(f"{CONFIG}  soup: {json.dumps(SOUP)}\n")
    return path


def soup(config: Path, *overrides: str) -> Stage:
    graph = compile_graph(load(config, overrides))
    return next(stage for stage in graph if stage.name == "soup")


def test_a_block_stands_for_the_model_of_each_domain(config: Path) -> None:
    stage = soup(config)
    assert stage.models == {"sums": "experts.sums", "words": "experts.words"}
    assert stage.inputs == ("cold_start", "experts.sums", "experts.words")
    assert stage.declared.work == "stages.kinds.merge_weights.work"
    assert (stage.trains, stage.needs_engine, stage.steps) == (True, False, 0)
    named = soup(config, PAIR, "stages.soup.weights={w: 2}")
    assert named.models == {"s": "experts.sums", "w": "experts.words"}


def test_a_stage_starts_from_it_and_evaluations_measure_it(config: Path) -> None:
    stages = {each.name: each for each in compile_graph(load(config, ["stages.merge.from=soup"]))}
    assert stages["merge"].parent == "soup"
    assert "soup" in stages["evaluate"].models


def test_a_plan_shows_what_is_merged(config: Path, braid: Braid) -> None:
    lines = braid("plan", str(config), "stages.soup.method=average")[1].splitlines()
    [row] = [line for line in lines if line.lstrip("│├└─ ").startswith("soup")]
    assert "cold_start and the weights of experts.sums, experts.words" in row
    alone = "stages.soup={kind: merge_weights, models: experts, from: null, method: average}"
    lines = braid("plan", str(config), alone)[1].splitlines()
    [place] = [n for n, line in enumerate(lines) if line.lstrip("│├└─ ").startswith("soup")]
    assert " the weights of experts.sums, experts.words" in lines[place]
    assert "experts.sums" in lines[place - 1]  # it stands below the first of them


def test_a_path_is_relative_to_its_file(config: Path) -> None:
    other = config.parent / "other"
    (other / "checkpoints").mkdir(parents=True)
    beside = soup(config, f"stages.soup.models={{s: experts.sums, w: {other}}}")
    assert beside.models["w"] == str(other)
    text = config.read_text().replace(
        '"models": "experts"', '"models": {"s": "merge", "w": "./no"}'
    )
    config.write_text(text)
    assert "no: no model there" in violation(config)


def test_models_are_added_up_in_the_given_order(config: Path) -> None:
    """A sum in floating point has other bits in another order."""
    pair: dict[str, Any] = {
        "from": "cold_start",
        "models": {"w": "experts.words", "s": "experts.sums"},
    }
    assert MergeWeightsSettings.model_validate(pair).names(()) == ("w", "s")
    block = MergeWeightsSettings.model_validate({**pair, "models": "experts"})
    assert block.names(("words", "sums")) == ("words", "sums")


def test_weights_method_and_models_make_it_stale(config: Path) -> None:
    def lineage(*overrides: str) -> Any:
        stage = soup(config, *overrides)
        return lineage_from(stage, dict.fromkeys(stage.sources), {})

    before = lineage()
    for override, key in (
        ("stages.soup.method={name: ties, density: 0.5}", "method"),
        ("stages.soup.weights={sums: 2}", "weights"),
        ("stages.soup.routers=kept", "routers"),
    ):
        assert any(key in each for each in changes(before, lineage(override))), key
    [other] = changes(before, lineage(PAIR))
    assert other == 'names was ["sums", "words"] and is now ["s", "w"]'
    assert not [*changes(before, lineage("seed=1"))]  # it draws nothing; its inputs are stale
    dare = "stages.soup.method=dare"
    assert [*changes(lineage(dare), lineage(dare, "seed=1"))]


def test_prompts_make_recalibrated_routers_stale(config: Path) -> None:
    prompts = "domains.sums.prompts.config={max_digits: 2}"
    merged = soup(config).reads
    assert soup(config, prompts).reads == soup(config, "seed=1").reads == merged
    assert not [key for key in merged if "recalibration" in key or key.startswith("domains")]
    recalibrated = "stages.soup.routers=recalibrated"
    before = soup(config, recalibrated).reads
    for override in (prompts, "seed=1", "stages.soup.recalibration.samples=9"):
        assert soup(config, recalibrated, override).reads != before, override
    for same in ("domains.sums.sampling.temperature=0.9", "domains.sums.loop.steps=3"):
        assert soup(config, recalibrated, same).reads == before
    shown = [recalibrated, "stages.soup.recalibration.data=demonstrations"]
    count = "domains.words.demonstrations.count=9"
    assert soup(config, recalibrated, count).reads == before
    assert soup(config, *shown, count).reads != soup(config, *shown).reads


def test_recalibrated_routers_read_the_domains_of_the_models_alone() -> None:
    given = {"models": {"b": "x", "a": "y"}, "routers": "recalibrated"}
    block = MergeWeightsSettings.model_validate(given)
    keys = [*block.run_keys(["a", "b", "c"])]
    assert keys == [*MODEL, "domains.b.prompts", "domains.a.prompts"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["stages.soup.routers=recalibrated", PAIR],
            "stages.soup.models: s, w: no domain of the stage, and routers: recalibrated reads"
            " samples of each model's; name each model as its domain: sums, words",
        ),
        (
            [
                "stages.soup.routers=recalibrated",
                "model.family=gpt_oss",
                "model.norm_epsilon=1e-5",
            ],
            "stages.soup.routers: recalibrated solves for a router's weight, and gpt_oss' have"
            " biases too; use merged or kept",
        ),
        (
            ["stages.soup.recalibration.samples=8"],
            "stages.soup.recalibration: only of routers: recalibrated; remove it",
        ),
        (
            ["stages.soup.routers=recalibrated", "stages.soup.recalibration.samples=0"],
            "stages.soup.recalibration.samples: should be greater than 0, not 0",
        ),
        (
            ["stages.soup.from=null"],
            "stages.soup.from: method ties reads the model that all others started from; name it",
        ),
        (
            ["stages.soup.from=null", "stages.soup.method=average", "stages.soup.routers=kept"],
            "stages.soup.from: routers: kept reads the model that all others started from; name it",
        ),
        (
            ["stages.soup.models={s: experts.sums}"],
            "stages.soup.models: 1 model cannot be merged; name at least two",
        ),
        (
            ["stages.soup.domains=[sums]"],
            "stages.soup.models: 1 model cannot be merged; name at least two",
        ),
        (
            ["stages.soup.models=cold_start"],
            "stages.soup.models: cold_start is one stage, and at least two models are merged; name"
            " a block with for_each: domain, or map free names to models",
        ),
        (
            ["stages.soup.models={a: experts.sums, b: experts.sums}"],
            "stages.soup.models.b: experts.sums is a too; give one of them a weight instead",
        ),
        (
            ["stages.soup.models=[experts.sums, experts.words]"],
            "stages.soup.models: should be a block with for_each: domain, or a mapping of free"
            ' names to models, not ["experts.sums", "experts.words"]',
        ),
        (
            ["stages.soup.models={a: experts.sums, b: expert.words}"],
            'stages.soup.models.b: no such stage: expert.words; did you mean "experts.words"?',
        ),
        (
            ["stages.soup.models={a: experts.sums, b: evaluate}"],
            "stages.soup.models.b: evaluate leaves results, and checkpoints are needed here",
        ),
        (
            ["stages.soup.weights={sums: 0, words: 0}"],
            "stages.soup.weights: the weights of all models are 0; give at least one a weight",
        ),
        (
            ["stages.soup.weights={sums: -1}"],
            "stages.soup.weights.sums: should be greater than or equal to 0, not -1",
        ),
        (
            ["stages.soup.weights={sum: 1}"],
            'stages.soup.weights.sum: no such model: sum; did you mean "sums"?',
        ),
        (
            ["stages.soup.weights={sums: 1}", "stages.soup.method=ram"],
            "stages.soup.weights: ram calculates its own weights; leave these out",
        ),
        (
            ["stages.soup.method={name: ties, density: 0}"],
            "stages.soup.method.density: should be greater than 0, not 0",
        ),
        (
            ["stages.soup.method={name: ties, density: 1.5}"],
            "stages.soup.method.density: should be less than or equal to 1, not 1.5",
        ),
        (
            ["stages.soup.method={name: dare, drop: 1}"],
            "stages.soup.method.drop: should be less than 1, not 1",
        ),
        (
            ["stages.soup.method=tie"],
            "stages.soup.method.name: should be 'average', 'dare', 'ram', 'sce',"
            " 'task_arithmetic' or 'ties', not \"tie\"; did you mean \"ties\"?",
        ),
    ],
)
def test_a_broken_rule_is_named(config: Path, overrides: list[str], message: str) -> None:
    found = [each.partition(": ")[2] for each in errors(config, *overrides)]
    assert message in found


def test_a_domain_without_demonstrations_is_named(config: Path, rows: Path) -> None:
    given = ["stages.soup.routers=recalibrated", "domains.words.rewards={right: {kind: math}}"]
    of_files = with_data(config, rows)
    assert violation(of_files, *given, "stages.soup.recalibration.data=demonstrations") == (
        "command line: stages.soup.recalibration.data: words has no demonstrations; state"
        " domains.words.demonstrations, or use prompts"
    )
    assert soup(of_files, *given).reads["domains.words.prompts.path"] == str(rows)


def test_a_renamed_stage_keeps_its_merges(config: Path, braid: Braid, runs: Path) -> None:
    pair = "stages.soup.models={{a: experts.sums, b: {}}}"
    code, _, err = braid("run", str(config), pair.format("merge"))
    assert code == 0, err
    distilled = edited_copy(
        config,
        ("\n  merge:\n", "\n  distilled:\n    was: merge\n"),
        ("from: merge", "from: distilled"),
    )
    assert braid("run", str(distilled), pair.format("distilled"))[0] == 0
    assert braid("status")[1] == "small: 7 done\n"
    assert len(list((runs / "small/stages/soup").glob("attempt_*"))) == 1
