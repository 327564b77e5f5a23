"""Rows of instructions whose arguments have other types or ranges than IFEval's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from stages.data.problem import Problem
from stages.rewards.kinds.instruction import CHECKS, NUMBERS, TEXTS, InstructionReward, make
from stages.rewards.reward import Explained, Response, RewardError, Score

FIRST_WORD = "length_constraints:nth_paragraph_first_word"


def graded(text: str, row: dict[str, Any]) -> Score | Explained:
    reward = make(InstructionReward(), Path())
    return reward(Problem("domain", 0, "prompt", "", row), Response(text, len(text)))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("keywords:forbidden_words", {"forbidden_words": "bad"}, "must be a list of words"),
        ("keywords:existence", {"keywords": "bad"}, "must be a list of words, not 'bad'"),
        ("keywords:existence", {"keywords": []}, "must be a list of words"),
        ("keywords:existence", {"keywords": ["a", 5]}, "must be a list of words"),
        ("keywords:frequency", {"keyword": "", "frequency": 1}, "keyword must be text, not ''"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": "2"}, "of at least 1, not '2'"),
        ("detectable_format:number_bullet_lists", {"num_bullets": "1"}, "must be a whole number"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 1.5}, "must be a whole number"),
        ("detectable_format:number_bullet_lists", {"num_bullets": True}, "must be a whole number"),
        ("length_constraints:number_words", {"num_words": -1}, "of at least 0, not -1"),
        ("startend:end_checker", {"end_phrase": 5}, "end_phrase must be text, not 5"),
        (
            FIRST_WORD,
            {"num_paragraphs": 2, "nth_paragraph": 0, "first_word": "b"},
            "nth_paragraph must be a whole number of at least 1, not 0",
        ),
        (
            FIRST_WORD,
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "b"},
            "no such paragraph",
        ),
        (
            FIRST_WORD,
            {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": 5},
            "first_word must be text, not 5",
        ),
    ],
)
def test_an_argument_of_another_type_or_range_is_an_error(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    row = {"instruction_id_list": [name], "kwargs": [arguments]}
    assert message in str(InstructionReward().row_violation(row, ""))
    with pytest.raises(RewardError, match=re.escape(message)):
        graded("x", row)


def test_whole_numbers_of_a_table_may_be_floats() -> None:
    own = {"num_paragraphs": 2.0, "nth_paragraph": 1.0, "first_word": "a"}
    row = {"instruction_id_list": [FIRST_WORD], "kwargs": [own]}
    assert graded("a\n\nb", row) == (1.0, "")


def test_every_argument_of_an_instruction_has_a_type() -> None:
    named = {key for check in CHECKS.values() for key in inspect.signature(check).parameters}
    typed = {*NUMBERS, *TEXTS, "keywords", "forbidden_words"}
    relations = {"relation", "let_relation", "capital_relation"}
    assert named - {"text", "self"} - relations == typed
