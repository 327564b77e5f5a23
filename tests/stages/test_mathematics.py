r"""Mathematical answers by value: numbers in all their spellings, small ones, and false boxes."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal
from pathlib import Path

import pytest

from stages.data.problem import Problem
from stages.data.row_forms import answer_of, parsed_line
from stages.data.tokenizer import CharacterTokenizer
from stages.domain_tools.row_check import answer_report
from stages.domains import DomainSettings
from stages.rewards.kinds.math import MathReward
from stages.rewards.mathematics import spelled
from stages.rewards.reward import Response, make

PLANCK, CHARGE = r"6.63\times 10^{-34}", r"1.6\times 10^{-19}"


def score(answer: str, response: str, boxed: bool = False) -> float:
    reward = make("math", "right", MathReward(boxed=boxed), Path("/nowhere"))
    scored = reward(Problem("math", 0, "?", answer), Response(response, 9))
    assert isinstance(scored, tuple) and isinstance(scored[0], float)
    return scored[0]


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("0.00001", "0.00001"),
        ("1e-05", "0.00001"),
        ("6.63E-34", f"0.{'0' * 33}663"),
        ("1e16", "10000000000000000"),
        ("-2.5e-7", "-0.00000025"),
        ("12", "12"),
        ("12.50", "12.5"),
        ("100000000000000000000001", "100000000000000000000001"),
        # A 64-bit float has 15 to 17 digits, and is between 1e-324 and 1e309.
        ("3.14159265358979323846", "3.14159265358979323846"),
        ("9007199254740993.0", "9007199254740993.0"),
        ("1e400", "1" + 400 * "0"),
        ("-25e-401", f"-0.{399 * '0'}25"),
    ],
)
def test_a_number_of_a_row_is_a_decimal(number: str, answer: str) -> None:
    row = parsed_line(f'{{"answer": {number}}}'.encode())
    assert isinstance(row, dict) and answer_of(row, "answer") == answer
    again = pickle.loads(pickle.dumps(row))  # as fields reach a reward's process
    assert answer_of(again, "answer") == answer
    assert json.loads(json.dumps(again)) == json.loads(f'{{"answer": {number}}}')


def test_a_decimal_of_parquet_is_its_digits() -> None:
    """As pyarrow reads a column of decimal128(38, 20)."""
    value = Decimal("3.14159265358979323846")
    assert answer_of({"answer": value}, "answer") == "3.14159265358979323846"


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        (r"\boxed{1.6e-19}", [f"\\boxed{{0.{'0' * 18}16}}"]),
        ("It is 2.5E+3.", ["It is 2500."]),
        ("2e-1", ["0.2", "2e-1"]),  # e may be Euler's number
        ("2e - 1", ["2e - 1"]),
        ("3e5x and 0x1e5 and 1.2.3e4", ["3e5x and 0x1e5 and 1.2.3e4"]),
        (r"1\,250.5 and 0.000\,01", ["1250.5 and 0.00001"]),
        ("10~250 and 1~25", ["10250 and 1~25"]),
        (r"\boxed{1 250 000}", [r"\boxed{1250000}"]),
        ("of 1 250", ["of 1 250"]),
        (r"\boxed{5.} and $6.$ and \(7.\) and 8.", [r"\boxed{5} and $6$ and \(7\) and 8."]),
    ],
)
def test_numbers_are_respelled(text: str, readings: list[str]) -> None:
    assert spelled(text) == readings


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("0.00001", r"\boxed{0.00001}", 1),
        ("0.00001", r"\boxed{10^{-5}}", 1),
        ("0.00001", r"\boxed{1e-05}", 1),
        ("0.00001", r"\boxed{-2.28171817}", 0),  # e - 5
        ("0.00001", r"\boxed{0.000011}", 0),
        ("0.00001", r"\boxed{0}", 0),
        ("0", r"\boxed{10^{-19}}", 0),
        ("0", r"\boxed{0.0}", 1),
        (PLANCK, rf"\boxed{{{CHARGE}}}", 0),
        (PLANCK, rf"\boxed{{{PLANCK}}}", 1),
        (PLANCK, r"\boxed{66.3\cdot 10^{-35}\ \text{J s}}", 1),
        (PLANCK, "about 6.63e-34", 1),
        ("6.63e-34", f"${PLANCK}$", 1),
        (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", 0),
        (r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}", 1),
        ("10^{-400}", r"\boxed{10^{-401}}", 0),
        (rf"({CHARGE}, 2)", rf"\boxed{{({PLANCK}, 2)}}", 0),
        (rf"({CHARGE}, 2)", rf"\boxed{{({CHARGE}, 2)}}", 1),
        (r"\{10^{-9}, 2\}", r"\boxed{\{2, 0.000000001\}}", 1),
        (r"\sqrt{2}\times 10^{-5}", r"\boxed{0.0000141421356}", 1),
        ("-0.00002", r"\boxed{2\times10^{-5}}", 0),
        ("1/7000", r"\boxed{0.000142857}", 1),
        ("1/7000", r"\boxed{0.000143}", 0),
        # As math-verify rounds: to 6 decimals.
        ("1/3", r"\boxed{0.333333}", 1),
        ("1/81", r"\boxed{0.012346}", 1),
        ("1/3", r"\boxed{0.33}", 0),
        (r"\frac{x}{10^6}", r"\boxed{0.000001x}", 1),
        ("10000000000000000", r"\boxed{1e16}", 1),
        ("2e-1", r"\boxed{2e - 1}", 1),
        ("2e - 1", r"\boxed{2e-1}", 1),
        ("1250", r"\boxed{1\,250}", 1),
        ("1250", r"\boxed{1~250}", 1),
        ("1250", r"\boxed{1 250}", 1),
        ("251", r"\boxed{1 250}", 0),  # it is no mixed number
        ("5", r"\boxed{5.}", 1),
        ("5.", r"\boxed{5}", 1),
        # An equation has its last side's value, unless it is false.
        ("7", r"\boxed{x = 7}", 1),
        ("7", r"\boxed{1 + 6 = 7}", 1),
        ("7", r"\boxed{6 = 7}", 0),
        ("7", r"\boxed{3 + 4 = 8 = 7}", 0),
        ("0.67", r"\boxed{\frac{2}{3} = 0.67}", 1),
        ("3.3e-10", r"\boxed{F = 6.67e-11 \cdot 5 = 3.3e-10}", 1),
        ("0.0001 < x < 0.0002", r"\boxed{(0.0001, 0.0002)}", 1),
        # A percentage has two values, since rows often leave the sign out.
        ("28", r"\boxed{28\%}", 1),
        ("0.28", r"\boxed{28\%}", 1),
        ("0.0005", r"\boxed{0.05\%}", 1),
    ],
)
def test_answers_are_equal_by_value(answer: str, response: str, right: int) -> None:
    assert score(answer, response) == right


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"so \boxed{7}, not 8", 1),
        (r"\boxed {7}", 1),
        (r"so \fbox{7}, after 3 steps", 1),
        (r"\boxed{\frac{14}{2}}", 1),
        (r"so \boxed{\boxed{7}}.", 1),
        (r"\boxed{8 \boxed{7}", 1),
        (r"7\boxed{", 0),
        (r"7" + r"\boxed{" * 20_000, 0),
        (r"\boxed{7} \boxed{", 0),
        (r"7 \boxed{}", 0),
        (r"7 \boxed{?}", 0),
        (r"7 \boxed{8}", 0),
        (r"\boxed 7", 0),
    ],
)
def test_a_box_must_be_closed_and_hold_the_answer(response: str, right: int) -> None:
    assert score("7", response, boxed=True) == right


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("5^{5^{5^{5^5}}}", "takes more than 0.5 s"),
        ("6 = 7", "equates unequal numbers"),
        (r"\$18", "cannot read the problem's answer"),
    ],
)
def test_a_row_whose_answer_no_response_can_equal_is_named(
    answer: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.domain_tools.row_check.ROW_SECONDS", 0.5)
    text = answer.replace("\\", "\\\\")
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "how many?", "answer": "{text}"}}\n')
    domain = {
        "prompts": {"source": "jsonl", "path": f"{tmp_path}/rows.jsonl", "answer": "answer"},
        "rewards": {"right": {"kind": "math"}},
        "optimizer": {"learning_rate": 1},
        "loop": {"steps": 1},
    }
    report = answer_report(DomainSettings.model_validate(domain), CharacterTokenizer(), "math")
    assert report.bad == 1 and why in report.first[0]
