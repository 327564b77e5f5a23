"""The check of all rows of a domain's files with the libraries of its rewards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from stages.data.tokenizer import CharacterTokenizer
from stages.domain_tools import row_check
from stages.domain_tools.row_check import AnswerReport, answer_report
from stages.domains import DomainSettings
from stages.rewards.kinds.math import MathReward

TOKENIZER = CharacterTokenizer()


def domain(path: Path, answers: list[str]) -> DomainSettings:
    rows = ({"prompt": f"say {n}", "answer": each} for n, each in enumerate(answers))
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts = {"source": "jsonl", "path": str(path), "answer": "answer"}
    rest = {"optimizer": {"learning_rate": 1}, "loop": {"steps": 1}}
    rewards = {"right": {"kind": "math"}, "short": {"kind": "length", "at_most": 9}}
    return DomainSettings.model_validate({"prompts": prompts, "rewards": rewards, **rest})


def test_answers_that_math_verify_cannot_read_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    found = answer_report(domain(path, ["1/2", *["$$"] * 5, "$3$"]), TOKENIZER, "sums")
    why = "reward right: cannot read the problem's answer '$$' as mathematics"
    assert found == AnswerReport(7, 7, 5, [f"{path}:{line}: {why}" for line in (2, 3, 4)])


def test_an_answer_that_is_read_for_ever_is_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(_self: MathReward, problem: Any) -> str | None:
        while problem.answer == "2":
            time.sleep(0.01)
        return None

    monkeypatch.setattr(MathReward, "problem_violation", endless)
    monkeypatch.setattr(row_check, "ROW_SECONDS", 0.1)
    found = answer_report(domain(tmp_path / "endless.jsonl", ["1", "2", "3"]), TOKENIZER, "sums")
    assert (found.checked, found.bad) == (3, 1)
    assert "reading its answer '2' takes more than 0.1 s" in found.first[0]


def test_no_more_than_three_answers_are_read_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(_self: MathReward, problem: Any) -> str | None:
        while problem.answer != "2":
            time.sleep(0.01)
        return None

    monkeypatch.setattr(MathReward, "problem_violation", endless)
    monkeypatch.setattr(row_check, "ROW_SECONDS", 0.1)
    answers = ["1", "2", "3", "4", "5", "6"]
    found = answer_report(domain(tmp_path / "slow.jsonl", answers), TOKENIZER, "sums")
    assert (found.rows, found.checked, found.bad) == (6, 4, 3)


def test_the_rows_left_when_the_time_is_up_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_check, "READING_SECONDS", -1.0)
    found = answer_report(domain(tmp_path / "left.jsonl", ["1", "2"]), TOKENIZER, "sums")
    assert found == AnswerReport(2, 0, 0, [])
