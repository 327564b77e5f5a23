"""The report of `braid domain check` on demonstrations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.data.problem import DomainError
from stages.data.prompts import PromptStream
from stages.data.tokenizer import CharacterTokenizer
from stages.domain_tools.domain_check import demonstration_report, reference
from stages.domains import DomainSettings

CHARACTERS = CharacterTokenizer()


def domain(**blocks: Any) -> DomainSettings:
    return DomainSettings.model_validate(
        {
            "prompts": {"dataset": "chain_sum", "held_out_fraction": 0.25},
            "optimizer": {"learning_rate": 1},
            "loop": {"steps": 1},
            **blocks,
        }
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Forty questions of four or five tokens, each with an answer of two; some rows are bad."""
    made = [{"prompt": f"say {n}", "response": "no"} for n in range(40)]
    lines = [json.dumps(row) for row in (*made, made[0], {"prompt": "say"})]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    return path


def files(path: Path, **keys: Any) -> dict[str, Any]:
    source = {"source": "jsonl", "path": str(path), "response": "response"}
    return {"demonstrations": {**source, "on_bad_row": "skip", **keys}}


def test_demonstrations_of_files_are_counted_and_shown(rows: Path) -> None:
    report = demonstration_report(domain(**files(rows)), CHARACTERS, "words", 8)
    assert report is not None
    assert (report.rows, report.bad, report.duplicates) == (42, 1, 1)
    assert report.usable + report.held_out == 40
    assert 0 < report.held_out < 20
    # "say 10", "no" and the end token: 9 tokens, of which the model reads 8 and learns 3.
    assert (report.tokens[0], report.tokens[100]) == (8, 9)
    assert (report.limit, report.too_long) == (8, 0)
    assert report.turns is not None and report.turns.tokens[100] == 3
    assert (report.turns.checked, report.turns.limit, report.turns.too_long) == (
        report.usable,
        24,
        0,
    )
    assert 3 / 9 < report.learned < 3 / 8
    assert len(report.examples) == 2
    assert all(asked[:4] == "say " and said == "no" for asked, said in report.examples)


def test_too_long_demonstrations_are_counted_and_must_not_be_all(rows: Path) -> None:
    settings = domain(**files(rows, max_tokens=7))
    report = demonstration_report(settings, CHARACTERS, "words", 100)
    assert report is not None
    assert report.limit == 7
    assert 0 < report.too_long < report.usable
    with pytest.raises(DomainError, match="every demonstration is longer than 6 tokens"):
        demonstration_report(domain(**files(rows, max_tokens=6)), CHARACTERS, "words", 100)


def test_an_unknown_limit_is_none(rows: Path) -> None:
    report = demonstration_report(domain(**files(rows)), CHARACTERS, "words", None)
    assert report is not None
    assert (report.limit, report.too_long) == (None, 0)


def test_a_bad_row_is_reported(rows: Path) -> None:
    with pytest.raises(DomainError, match=r"demonstrations: .*rows.jsonl:42: no column"):
        demonstration_report(domain(**files(rows, on_bad_row="stop")), CHARACTERS, "words", None)


def test_generated_demonstrations_are_checked() -> None:
    wanted = {"demonstrations": {"count": 30, "worked_fraction": 1.0}}
    report = demonstration_report(domain(**wanted), CHARACTERS, "sums", 256)
    assert report is not None
    assert (report.rows, report.usable, report.too_long) == (30, 30, 0)
    assert all(said.startswith("<") and asked.endswith("=") for asked, said in report.examples)


def test_prompts_of_files_have_no_generated_demonstrations(rows: Path) -> None:
    prompts = {"source": "jsonl", "path": str(rows)}
    assert demonstration_report(domain(prompts=prompts), CHARACTERS, "words", 8) is None


@pytest.mark.parametrize(("working", "response"), [("required", "<3>"), ("forbidden", "<>")])
def test_the_reference_shows_work_unless_that_is_forbidden(working: str, response: str) -> None:
    asked = domain(
        prompts={"dataset": "spell_backward", "config": {"min_word_len": 3, "max_word_len": 3}},
        rewards={"exact": {"kind": "reasoning_gym", "working": working}},
    )
    [problem] = PromptStream(asked.prompts, CHARACTERS, "words", 0, "check").take(1)
    assert reference(problem, asked) == response + problem.answer
