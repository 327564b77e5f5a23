"""Blocks of stages: their names and references, and every form that no graph can be compiled of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.unroll import unread
from pipeline.config.validate import load
from pipeline.run.graph import Stage, compile_graph
from tests.pipeline.violations import MIXED, TRAINED, edited, errors
from tests.runs import REPOSITORY

Braid = Callable[..., tuple[int, str, str]]
LAST = "  export: {kind: export, from: merge}\n"


def stages_of(config: Path, *overrides: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in compile_graph(load(config, overrides))}


def with_block(config: Path, block: str) -> Path:
    """Add a block of a stage below the others."""
    return edited(config, LAST, f"{LAST}  {block}\n")


# Names and references.


@pytest.mark.parametrize("template", ["expert.{domain}", "{domain}", "a-{domain}.b"])
def test_a_template_names_the_stage_of_each_domain(config: Path, template: str) -> None:
    stages = stages_of(config, f"stages.experts.as='{template}'")
    names = [template.replace("{domain}", domain) for domain in ("sums", "words")]
    assert list(stages) == ["cold_start", *names, "merge", "evaluate", "export"]
    assert stages["merge"].teachers == dict(zip(("sums", "words"), names, strict=True))
    assert [stages[name].block for name in names] == ["experts", "experts"]


def test_a_block_is_referred_to_by_its_own_name_and_by_those_of_its_stages(config: Path) -> None:
    with_block(config, "again: {kind: grpo, from: experts, for_each: domain}")
    stages = stages_of(config)
    assert stages["again.sums"].parent == "experts.sums"
    assert stages["again.words"].parent == "experts.words"
    every = stages_of(config, "stages.again.from=experts.sums")
    assert {every[name].parent for name in ("again.sums", "again.words")} == {"experts.sums"}
    own = stages_of(config, "stages.again.from='experts.{domain}'")
    assert own["again.words"].parent == "experts.words"


def test_a_named_stage_is_referred_to_by_its_block_too(config: Path) -> None:
    stages = stages_of(config, "stages.cold_start.as=begin")
    assert stages["experts.sums"].parent == stages["merge"].parent == "begin"
    assert stages_of(config, "stages.cold_start.as=begin", "stages.experts.from=begin")


def test_teachers_may_be_named_by_a_template(config: Path) -> None:
    by_template = stages_of(config, "stages.merge.teachers='experts.{domain}'")
    assert by_template["merge"].teachers == {"sums": "experts.sums", "words": "experts.words"}
    crossed = stages_of(config, "stages.merge.teachers={sums: experts.words, words: experts.sums}")
    assert crossed["merge"].teachers == {"sums": "experts.words", "words": "experts.sums"}


def test_a_stage_of_each_domain_has_its_own_teacher_and_weight(config: Path) -> None:
    named = "teachers: {sums: experts, words: cold_start}, domain_weights: {words: 2}"
    with_block(
        config, f"own: {{kind: distill, from: merge, for_each: domain, {named}, {TRAINED[1:]}"
    )
    stages = stages_of(config)
    assert stages["own.sums"].teachers == {"sums": "experts.sums"}
    assert stages["own.words"].teachers == {"words": "cold_start"}
    found = errors(config, "stages.own.domains=[sums]")
    assert [each.partition(": ")[2] for each in found] == [
        "stages.own.teachers.words: no such domain: words; known: sums",
        "stages.own.domain_weights.words: no such domain: words; known: sums",
    ]


def test_a_block_of_one_stage_may_teach_every_domain(config: Path) -> None:
    stages = stages_of(config, "stages.experts.domains=[sums]")
    assert stages["merge"].teachers == {"sums": "experts.sums", "words": "experts.sums"}


def test_a_path_is_a_model_outside_the_run(config: Path, start: Path) -> None:
    edited(
        config, "experts: {kind: grpo, from: cold_start,", "experts: {kind: grpo, from: ./start,"
    )
    edited(config, "teachers: experts", "teachers: {sums: experts, words: start/}")
    stages = stages_of(config)
    expert, merge = stages["experts.sums"], stages["merge"]
    assert (expert.parent, expert.inputs, expert.sources) == (str(start), (), (str(start),))
    assert merge.teachers == {"sums": "experts.sums", "words": str(start)}
    assert merge.inputs == ("cold_start", "experts.sums")
    assert merge.waits_for == ("cold_start", "experts.sums")


def test_a_stage_waits_for_what_it_does_not_load(config: Path) -> None:
    stages = stages_of(
        config,
        "stages.experts.domains=[words]",
        MIXED,
        "stages.mixed.after=[experts]",
        "stages.merge.teachers={sums: mixed, words: experts}",
    )
    assert stages["mixed"].waits_for == ("cold_start", "experts.words")
    assert stages["mixed"].inputs == ("cold_start",)


def test_random_numbers_derive_from_another_name_where_one_is_stated(config: Path) -> None:
    plain = stages_of(config)
    assert [stage.seeded_as for stage in plain.values()] == [*plain]
    for was in ("was=experts", "was='experts.{domain}'"):
        renamed = stages_of(config, "stages.experts.as='new.{domain}'", f"stages.experts.{was}")
        assert renamed["new.sums"].seeded_as == "experts.sums"
        assert renamed["new.sums"].reads == plain["experts.sums"].reads
    assert stages_of(config, "stages.merge.was=first")["merge"].seeded_as == "first"


# What no graph can be compiled of.


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("more: {kind: sfft}", "stages.more.kind: should be "),
        (
            "more: {kind: export, from: merg}",
            'stages.more.from: no such stage: merg; did you mean "merge"?',
        ),
        (
            "more: {kind: export, from: experts}",
            "stages.more.from: experts stands for 2 stages: name one of experts.sums, "
            "experts.words",
        ),
        (
            "more: {kind: export, from: merge, as: experts.sums}",
            "stages.more: two stages would be named experts.sums, of this block and of "
            "stages.experts; rename a block, or set `as`",
        ),
        (
            "more: {kind: grpo, from: cold_start, domains: [sum]}",
            'stages.more.domains: no such domain: sum; did you mean "sums"?',
        ),
        (
            "more: {kind: grpo, from: cold_start, domains: []}",
            "stages.more.domains: must name at least one domain; null is all",
        ),
        (
            "more: {kind: grpo, from: cold_start, for_each: domain, as: more}",
            "stages.more.as: more would name the stages of all domains alike; write more.{domain}",
        ),
        (
            "more: {kind: grpo, from: cold_start, for_each: domain, was: ../more}",
            "stages.more.was: ../more must be letters, digits, _, - or ., since it names",
        ),
        (
            "more: {kind: export, from: merge, as: ../more}",
            "stages.more.as: ../more must be letters, digits, _, - or ., since it names",
        ),
        (
            f"more: {{kind: sft, gate: {{}}, {TRAINED[1:]}",
            "stages.more.gate: it compares the stage with what that starts from, and "
            "stages.more.from is null",
        ),
        (
            "more: {kind: export, from: evaluate}",
            "stages.more.from: evaluate leaves results, and checkpoints are needed here",
        ),
        (
            "more: {kind: export, from: merge, after: [./start]}",
            "stages.more.after: ./start is a path; only stages of the run can be waited for",
        ),
        ("more: {kind: export}", "stages.more.from: must name the stage whose model is"),
        ("more: {kind: grpo, for_each: domain}", "stages.more.from: must name what the policy"),
        (
            f"more: {{kind: distill, teachers: experts, {TRAINED[1:]}",
            "stages.more.from: must name what the student starts from",
        ),
        (
            "more: {kind: grpo, from: cold_start}",
            "stages.more.optimizer: required with several domains (sums, words)",
        ),
        (
            f"more: {{kind: distill, from: cold_start, teachers: {{sums: experts}}, {TRAINED[1:]}",
            "stages.more.teachers: no teacher for the domain words; add one, or leave it out of"
            " domains: [sums]",
        ),
        (
            f"more: {{kind: distill, from: cold_start, teachers: {{}}, {TRAINED[1:]}",
            "stages.more.teachers: no teacher for the domains sums, words; add one",
        ),
        (
            "more: {kind: distill, from: cold_start, teachers: {sums: experts, word: experts}, "
            f"{TRAINED[1:]}",
            'stages.more.teachers.word: no such domain: word; did you mean "words"?',
        ),
    ],
)
def test_a_block_that_cannot_work_is_reported_with_file_and_line(
    config: Path, block: str, message: str
) -> None:
    first = f"  {block}".split("\n")[0]
    line = with_block(config, block).read_text().splitlines().index(first) + 1
    found = errors(config)
    assert any(each.startswith(f"small.yaml:{line}: {message}") for each in found), found


def test_a_block_without_a_stage_of_the_domain_is_no_teacher_of_it(config: Path) -> None:
    edited(config, "prompts: {dataset: chain_sum}", "prompts: {dataset: chain_sum}\n")
    third = "domains={third: {prompts: {dataset: chain_sum}, optimizer: {learning_rate: 1}, "
    of_two = (f"{third}loop: {{steps: 1}}}}}}", "stages.experts.domains=[sums, words]")
    found = errors(config, *of_two)
    assert [each.partition(": ")[2] for each in found] == [
        "stages.merge.teachers: experts has no stage of the domain third; it has experts.sums, "
        "experts.words"
    ]
    assert found[0].startswith("small.yaml:")


@pytest.mark.parametrize(
    ("override", "key", "cycle"),
    [
        ("stages.merge.from=merge", "merge.from", "merge -> merge"),
        (
            "stages.experts.from='experts.{domain}'",
            "experts.from",
            "experts.sums -> experts.sums",
        ),
        ("stages.cold_start.from=merge", "cold_start.from", "cold_start -> merge -> cold_start"),
        ("stages.cold_start.after=[export]", "cold_start.after", "cold_start -> export -> merge"),
    ],
)
def test_a_cycle_is_reported_at_the_reference_that_closes_it(
    config: Path, override: str, key: str, cycle: str
) -> None:
    found = errors(config, override)
    assert found[0].startswith(f"command line: stages.{key}: dependency cycle: {cycle}"), found


OLD_FORM = {
    "cold_start: null": ("cold_start: renamed to stages.cold_start, with kind: sft", "Without one"),
    "merge: null": ("merge: renamed to stages.merge, with kind: distill", "merge: null, export"),
    f"mixed: {TRAINED}": ("mixed: renamed to stages.mixed, with kind: grpo", "optimizer and loop"),
    "rounds: 2": ("rounds: renamed to blocks of stages for each round", "two-rounds.yaml"),
}


@pytest.mark.parametrize("said", OLD_FORM)
def test_a_key_of_the_former_form_is_reported_with_its_new_form(config: Path, said: str) -> None:
    edited(config, "name: small\n", f"name: small\n{said}\n")
    [found] = errors(config)
    start, end = OLD_FORM[said]
    assert found.startswith(f"small.yaml:2: {start}")
    assert end in found


@pytest.mark.parametrize(
    ("said", "new"),
    [("from: cold_start", "stages.NAME.from"), ("gate: {min_gain: 0}", "stages.NAME.gate")],
)
def test_a_key_of_a_former_domain_is_reported_with_its_new_form(
    config: Path, said: str, new: str
) -> None:
    edited(config, "  words:\n", f"  words:\n    {said}\n")
    line = config.read_text().splitlines().index(f"    {said}") + 1
    [found] = errors(config)
    key = said.partition(":")[0]
    assert found.startswith(f"small.yaml:{line}: domains.words.{key}: renamed to {new}")


def warnings(braid: Braid, config: Path, *overrides: str) -> list[str]:
    """Return the warnings in the JSON of `validate`, which commands print to standard error."""
    code, out, err = braid("validate", config, *overrides, "--json")
    assert (code, err) == (0, "")
    found = [str(each) for each in json.loads(out)["warnings"]]
    for command in (("validate",), ("plan",), ("run", "--dry-run")):
        code, out, err = braid(*command, config, *overrides)
        assert (code, err) == (0, "".join(f"warning: {line}\n" for line in found))
        assert not any(line in out for line in found)
    return [each.removeprefix(f"{config.parent}/") for each in found]


def test_a_stage_that_nothing_reads_is_a_warning_with_file_and_line(
    braid: Braid, config: Path
) -> None:
    """An evaluation of every model reads what nothing else does."""
    with_block(config, "alone: {kind: grpo, from: cold_start, domains: [sums]}")
    assert warnings(braid, config) == []
    some = "stages.evaluate.models=[merge]"
    assert warnings(braid, config, some) == [
        "small.yaml:36: stages.alone: no stage reads the checkpoints of alone; evaluate or export "
        "the model, or delete the block"
    ]
    for reads in ("stages.evaluate.models=[merge, alone]", "stages.export.from=alone"):
        assert [each for each in warnings(braid, config, some, reads) if "alone" in each] == []
    waits = warnings(braid, config, some, "stages.export.after=[alone]")
    assert len(waits) == 1  # what only waits for it reads nothing
    assert warnings(braid, config, some, "stages.alone.gate.problems=20") == []


def test_a_key_of_a_method_that_is_not_read_is_a_warning_with_file_and_line(
    braid: Braid, config: Path
) -> None:
    line = "    teachers: experts\n"
    keys = "correction: {name: tis}, extrapolate: everywhere, top_p: 0.9, start: experts.sums"
    edited(config, line, f"{line}    method:\n      {{name: exopd, {keys}}}\n")
    at = "small.yaml:33: stages.merge.method"
    correction = f"{at}.correction: only read with over: sampled; set that, or delete the key"
    assert warnings(braid, config) == [
        correction,
        f"{at}.top_p: only read with extrapolate: nucleus; set that, or delete the key",
    ]
    sampled = ("stages.merge.method.over=sampled", "stages.merge.method.extrapolate=nucleus")
    assert warnings(braid, config, *sampled) == []
    assert warnings(braid, config, "stages.merge.method.lambda=1") == [
        correction,
        *(
            f"{at}.{key}: only read with another lambda than 1; set that, or delete the key"
            for key in ("start", "extrapolate", "top_p")
        ),
    ]


def test_a_block_of_which_stages_nothing_reads_is_one_warning(braid: Braid, config: Path) -> None:
    with_block(
        config,
        "collect: {kind: sample, from: merge, for_each: domain, prompts: 8, keep: {reward: null}}",
    )
    assert warnings(braid, config) == [
        "small.yaml:36: stages.collect: no stage reads the data of collect.sums, collect.words; "
        "name it in `data` of another stage, or delete the block"
    ]


@pytest.mark.parametrize(("more", "end"), [("cd", "; name it"), ("cde", " and 1 more; name it")])
def test_a_warning_names_the_first_four_stages(config: Path, more: str, end: str) -> None:
    block = "collect: {kind: sample, from: merge, for_each: domain, prompts: 8, "
    with_block(config, f"{block}keep: {{reward: null}}}}")
    own = f"{{prompts: {{dataset: chain_sum}}, {TRAINED[1:]}\n"
    edited(config, "stages:\n", "".join([*(f"  {name}: {own}" for name in more), "stages:\n"]))
    [(_, message)] = unread(load(config))
    named = "the data of collect.sums, collect.words, collect.c, collect.d"
    assert message.startswith(f"no stage reads {named}{end}")


@pytest.mark.parametrize(
    "path",
    [
        *sorted((REPOSITORY / "configs" / "recipes").glob("[!_]*.yaml")),
        *(REPOSITORY / "configs" / f"{name}.yaml" for name in ("quickstart", "smoke")),
    ],
    ids=lambda path: path.stem,
)
def test_every_stage_of_a_recipe_is_read(path: Path) -> None:
    assert [*unread(load(path, to_start=False))] == []
