"""Wrong blocks of stages: one message each, with file and line, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.kinds import KINDS
from tests.pipeline.violations import TRAINED, edited, errors
from tests.runs import REPOSITORY

LAST = "  export: {kind: export, from: merge}\n"
NAME = "a block's name must be 1 to 100 letters, digits, _ or -, and start with a letter or digit"
STATED = sorted(name for name, kind in KINDS.items() if kind.settings)
ANY_KIND = f"{', '.join(map(repr, STATED[:-1]))} or {STATED[-1]!r}"
TRAINING = "only of distill, dpo, grpo, quantize, sft"
MORE = f"data: {{x: {{stage: merge}}}}, sequences_per_step: 4, {TRAINED[1:-1]}"

# Of a block below the others: the message after file and line.
BLOCKS = {
    "more: {kind: grop}": (
        f'stages.more.kind: should be {ANY_KIND}, not "grop"; did you mean "grpo"?'
    ),
    "more: {from: merge}": "stages.more.kind: required key is missing",
    "more: [sft]": 'stages.more: should be a mapping of keys to values, not ["sft"]',
    "more: sft": 'stages.more: should be a mapping of keys to values, not "sft"',
    "experts.math: {kind: export, from: merge}": f"stages.experts.math: {NAME}",
    "experts.sums: {kind: export, from: merge}": f"stages.experts.sums: {NAME}",
    "more/less: {kind: export, from: merge}": f"stages.more/less: {NAME}",
    ".more: {kind: export, from: merge}": f"stages..more: {NAME}",
    "_more: {kind: export, from: merge}": f"stages._more: {NAME}",
    "'': {kind: export, from: merge}": f"stages.: {NAME}",
    f"{'m' * 300}: {{kind: export, from: merge}}": "stages.mmm",
    "more: {kind: export, from: merge, as: ''}": (
        'stages.more.as: "" must be letters, digits, _, - or ., since it names a directory'
    ),
    f"more: {{kind: export, from: merge, as: {'m' * 300}}}": (
        "stages.more.as: a stage would have a name of 300 characters, which names a directory; at "
        "most 201 are allowed"
    ),
    "more: {kind: export, from: merge, as: 'a.{domain}'}": (
        "stages.more.as: a.{domain} has no domain without for_each: domain; add that"
    ),
    "more: {kind: export, from: merge, as: experts.sums}": (
        "stages.more: two stages would be named experts.sums, of this block and of stages.experts; "
        "rename a block, or set `as`"
    ),
    "more: {kind: export, from: ''}": 'stages.more.from: no such stage: ""; known: cold_start',
    "more: {kind: evaluate, from: merge}": (
        "stages.more.from: an evaluation starts from nothing; use models: [merge]"
    ),
    "more: {kind: export, from: evaluate}": (
        "stages.more.from: evaluate leaves results, and checkpoints are needed here"
    ),
    "more: {kind: grpo, from: export, for_each: domain}": (
        "stages.more.from: export leaves export, and checkpoints are needed here"
    ),
    "more: {kind: grpo, from: nobody, for_each: domain}": (
        "stages.more.from: no such stage: nobody; known: cold_start"
    ),
    "more: {kind: grpo, from: merge, for_each: domian}": (
        "stages.more.for_each: should be 'domain', not \"domian\""
    ),
    f"more: {{kind: sft, {MORE}}}": (
        "stages.more.data.x.stage: merge leaves checkpoints, and data are needed here"
    ),
    "more: {kind: export, from: merge, after: [nobody]}": (
        "stages.more.after: no such stage: nobody; known: cold_start"
    ),
    "more: {kind: export, from: merge, after: merge}": (
        'stages.more.after: should be a list, not "merge"'
    ),
    "more: {kind: export, from: merge, gate: {problems: 20}}": (
        f"stages.more.gate: stages of kind export have no such key; {TRAINING}"
    ),
    "more: {kind: evaluate, gate: {problems: 20}}": (
        f"stages.more.gate: stages of kind evaluate have no such key; {TRAINING}"
    ),
    f"more: {{kind: sft, teachers: experts, {TRAINED[1:]}": (
        "stages.more.teachers: stages of kind sft have no such key; only of distill"
    ),
    f"more: {{kind: distill, from: merge, teachers: [experts], {TRAINED[1:]}": (
        "stages.more.teachers: should be a block, or a mapping of domains to blocks or stages, or"
        ' to several of them with a weight each, not ["experts"]'
    ),
    f"more: {{kind: distill, from: merge, teachers: {{words: experts}}, {TRAINED[1:]}": (
        "stages.more.teachers: no teacher for the domain sums; add one, or leave it out of domains:"
        " [words]"
    ),
    "more: {kind: grpo, from: more, for_each: domain}": (
        "stages.more.from: dependency cycle: more.sums -> more.sums"
    ),
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[:50])
def test_a_wrong_block_is_one_message_with_file_and_line(config: Path, block: str) -> None:
    edited(config, LAST, f"{LAST}  {block}\n")
    line = config.read_text().splitlines().index(f"  {block}") + 1
    [found] = errors(config)
    assert found.startswith(f"small.yaml:{line}: {BLOCKS[block]}")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (" {}", "should have at least 1 item, not 0"),
        ("", "should be a mapping of keys to values, not null"),
        (" null", "should be a mapping of keys to values, not null"),
        (" [sft]", 'should be a mapping of keys to values, not ["sft"]'),
    ],
)
def test_no_stages_are_one_message(config: Path, stages: str, message: str) -> None:
    head, _, _ = config.read_text().partition("stages:\n")
    config.write_text(f"{head}stages:{stages}\n")
    assert errors(config) == [f"small.yaml:{len(head.splitlines()) + 1}: stages: {message}"]


def test_a_cycle_of_several_stages_is_one_message(config: Path) -> None:
    """Every cycle through one reference, and those of all domains."""
    for reference in ("stages.cold_start.after=[merge]", "stages.cold_start.from=merge"):
        [found] = errors(config, reference)
        assert ": dependency cycle: cold_start -> merge -> cold_start" in found
    edited(config, LAST, f"{LAST}  first: {{kind: grpo, from: second, for_each: domain}}\n")
    edited(config, LAST, f"{LAST}  second: {{kind: grpo, from: first, for_each: domain}}\n")
    [found] = errors(config)
    assert found.endswith("dependency cycle: second.sums -> first.sums -> second.sums")


def test_a_template_alone_is_said_to_be_one() -> None:
    path = REPOSITORY / "configs/pipelines/experts-merge.yaml"
    [error] = errors(path)
    place = f"{path.relative_to(Path.cwd())}"
    assert error.startswith(
        f"{place}:8: stages: a template of stages, not a run; a run has extends"
    )
    assert f"extends: {place}, its own name, model and domains" in error
