"""Every dataset of reasoning-gym as a domain: its problems, its scorer, and hostile answers."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tools.reasoning_gym_datasets import dataset_classes, source_of

from stages.data import reasoning_gym_options
from stages.data.answer_readers import read_expression, read_literal
from stages.data.problem import DomainError, Problem
from stages.data.reasoning_gym import (
    EVALUATORS,
    ONE_BY_ONE,
    READERS,
    SCORER,
    ReasoningGymSource,
    contained,
    score,
    tagged,
)
from stages.data.reasoning_gym_options import HASHED, REFUSED, dataset_violation, pinned
from stages.data.settings import ReasoningGymPromptSettings
from stages.data.tokenizer import CHAT_TEMPLATE, CharacterTokenizer
from stages.data.whole_answers import MEANINGLESS, SEARCHING
from stages.rewards.kinds.reasoning_gym import CORRECT, ReasoningGymReward, exact
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Response, RewardPoolSettings
from tests.awaiting import PATIENCE_SECONDS
from tests.stages.scorer_source import evaluations

TOKENIZER = CharacterTokenizer()
CALLS = {"eval", "exec", "compile", "parse_expr", "sympify"}
HOSTILE = [
    "__import__('os').system('touch {0}')",
    "[__import__('os').system('touch {0}')]",
    "().__class__.__base__.__subclasses__()",
    "open('{0}', 'w')",
    'S(\'__import__("os").system("touch {0}")\')',
    "[c for c in iter(int, 1)]",
    "(lambda f: f(f))(lambda f: f(f))",
    "9**9**9**9",
    "(((9**99)**99)**99)**99",
    "factorial(10**9)",
    "1e999999999",
    "[" * 5000,
    "(" * 5000,
    "[" + "'Q'," * 10**6 + "]",
]


def problem_of(dataset: str, index: int = 0, **config: object) -> Problem:
    prompts = ReasoningGymPromptSettings(dataset=dataset, config=config, form="chat")
    return ReasoningGymSource(prompts, TOKENIZER, "puzzles", 7).problem(index)


def calls_in_scorer(dataset_class: type[Any]) -> list[str]:
    """Return the evaluators that `score_answer` names at all, on the entry too."""
    [own] = [
        each
        for each in ast.parse(source_of(dataset_class).read_bytes()).body
        if isinstance(each, ast.ClassDef) and each.name == dataset_class.__name__
    ]
    found = (each for each in ast.walk(own) if isinstance(each, ast.FunctionDef))
    return [
        ast.unparse(call)
        for function in found
        if function.name == SCORER
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in CALLS
    ]


def test_the_table_has_every_evaluation_in_a_scorer_of_the_installed_package() -> None:
    """Follow the answer through the source: a new version needs a new table, or a reader."""
    calls = {
        name: evaluations(source_of(dataset), dataset.__name__)
        for name, (dataset, _) in dataset_classes().items()
    }
    found = {name: {call.function for call in of} for name, of in calls.items() if of}
    assert found == {name: {evaluator} for name, evaluator in EVALUATORS.items()}
    assert all(call.in_scorer for of in calls.values() for call in of)
    for evaluator in EVALUATORS.values():
        library, _, function = evaluator.rpartition(".")
        assert function in READERS
        assert function == "parse_expr" or not library  # `eval` is only the builtin


def test_every_evaluator_in_a_scorer_is_found_or_reads_the_entry_alone() -> None:
    """A plain search of the source, beside the one that follows the answer."""
    named = {name: calls_in_scorer(dataset) for name, (dataset, _) in dataset_classes().items()}
    missed = {name: calls for name, calls in named.items() if calls and name not in EVALUATORS}
    assert set(missed) <= {"number_sorting"}
    assert all(call == "eval(entry['answer'])" for calls in missed.values() for call in calls)


@pytest.mark.parametrize("dataset", EVALUATORS)
def test_a_hostile_answer_is_read_and_never_run(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    problem, touched, begun = problem_of(dataset), tmp_path / "touched", time.monotonic()
    for answer in HOSTILE:
        text = answer.replace("{0}", str(touched))
        assert exact(problem, tagged(text, "")) == 0.0
        assert score(problem, text) < 0.2
        assert not touched.exists()  # before the next, which an evaluator might never end
    assert time.monotonic() - begun < 10
    assert exact(problem, tagged(problem.answer, "so")) == 1.0


def test_an_unevaluated_integral_is_no_answer() -> None:
    problem = problem_of("simple_integration")
    integrand = problem.fields["entry"]["metadata"]["integrand"]
    variable = problem.fields["entry"]["metadata"]["variable"]
    assert exact(problem, tagged(f"Integral({integrand}, {variable})", "")) == 0.0


def test_equal_answers_of_another_form_are_right() -> None:
    problem = problem_of("simple_integration")
    assert exact(problem, tagged(f"7 + ({problem.answer})", "")) == 1.0
    board = problem_of("n_queens")
    rows = [line.split() for line in board.answer.splitlines()]
    assert 0 < score(board, str(rows)) < 1


@pytest.mark.parametrize("text", ["f.x", "f(1)", "sin(1, 2)", "_x", "x[0]", "'x'", "1 if x else 2"])
def test_what_is_no_expression_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="no part of an expression"):
        read_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "1e-10000000",
        "0e99999999",
        "1.5E-1_000_000",
        "x**1e-999999999",
        "sin(1e-9999999)",
        "2**(1/1e-300)",
        "exp(1/1e-300)",
        "2**(x/(1/10**300))",
    ],
)
def test_a_number_that_takes_for_ever_to_compute_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="a number "):
        read_expression(text)


def test_small_numbers_are_read() -> None:
    assert str(read_expression("x**0.0001")) == "x**0.0001"
    assert str(read_expression("exp(0.001*x)")) == "exp(0.001*x)"
    assert abs(read_expression("1e-300/1e-308") - 10**8) < 1


def test_readers_read_what_the_scorers_evaluate() -> None:
    assert read_literal("[['Q', '_'], [1, -2.5]]") == [["Q", "_"], [1, -2.5]]
    assert read_expression("2*(3 + 4)**2/7") == 14
    assert str(read_expression("sin(x)**2 + exp(-2*x)*sqrt(3)")) == "sin(x)**2 + sqrt(3)*exp(-2*x)"


def test_a_slow_scorer_is_killed_and_only_its_answer_earns_nothing(tmp_path: Path) -> None:
    """A fraction of a thousand million digits is parsed by no evaluator, and takes the memory."""
    problem = problem_of("coin_flip")
    pool = RewardPoolSettings(workers=1, timeout_seconds=15.0, memory_mebibytes=2048)
    answers = [tagged(each, "") for each in ("1e999999999", problem.answer)]
    responses = [Response(each, len(each)) for each in answers]
    with closing(RewardPool({"puzzles": {"exact": ReasoningGymReward()}}, pool, tmp_path)) as made:
        grades = [each.result(PATIENCE_SECONDS) for each in made.submit(problem, responses)]
    assert [each.reward for each in grades] == [0.0, 1.0]


def test_an_evaluation_below_the_scorer_is_found_too(tmp_path: Path) -> None:
    """In a function of another module of its package, and in the answer's words alone."""
    (tmp_path / "helper.py").write_text(
        "def check(text):\n    found = text + ''\n    exec(found)\n"
    )
    module = tmp_path / "puzzle.py"
    module.write_text(
        "from .helper import check\nclass Puzzle:\n"
        "    def score_answer(self, answer, entry):\n        check(entry)\n"
        "        own = [check(each) for each in answer.split()]\n        return 1.0\n"
    )
    [call] = evaluations(module, "Puzzle")
    assert (call.line, call.call, call.in_scorer) == (3, "exec(found)", False)


def test_the_scorers_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them might run a response's text as code."""
    monkeypatch.setattr(reasoning_gym_options, "version", lambda name: "0.1.26")
    reasoning_gym_options.version_violation.cache_clear()
    message = (
        "the options and scorers of reasoning-gym 0.1.25 are known, and 0.1.26 is installed;"
        " install reasoning-gym==0.1.25"
    )
    assert dataset_violation("gcd") == message
    with pytest.raises(DomainError, match=message):
        problem_of("gcd")
    with pytest.raises(ValueError, match=message):
        contained("gcd", object())
    reasoning_gym_options.version_violation.cache_clear()


def test_a_prompt_asks_the_datasets_question_and_an_answer_stands_in_tags() -> None:
    problem = problem_of("countdown", min_numbers=3, max_numbers=3)
    assert problem.messages is not None
    assert problem.messages[0]["content"].startswith(problem.fields["entry"]["question"])
    assert problem.messages[0]["content"].endswith("between <answer> and </answer>.")
    assert problem.prompt.startswith("user: ")
    assert CHAT_TEMPLATE
    for text, expected in {
        tagged(problem.answer, ""): 1.0,
        f"<answer>1</answer> no: <answer> {problem.answer}\n</answer>.": 1.0,
        problem.answer: 0.0,
        f"<answer>{problem.answer}": 0.0,
        f"{problem.answer}</answer>": 0.0,
        f"<answer>{problem.answer}</answer><answer>1</answer>": 0.0,
        "": 0.0,
    }.items():
        assert exact(problem, text) == expected, text


def test_the_instruction_follows_the_question_unless_it_is_empty() -> None:
    for instruction, end in (("Be brief.", "\n\nBe brief."), ("", "")):
        prompts = ReasoningGymPromptSettings(dataset="gcd", form="chat", instruction=instruction)
        problem = ReasoningGymSource(prompts, TOKENIZER, "puzzles", 7).problem(0)
        question = problem.fields["entry"]["question"]
        assert problem.messages == ({"role": "user", "content": question + end},)


@pytest.mark.parametrize("dataset", sorted(ONE_BY_ONE - HASHED))
def test_problems_that_are_drawn_one_by_one_differ(dataset: str) -> None:
    assert len({problem_of(dataset, index).prompt for index in range(3)}) > 1


def test_nan_is_no_answer_where_numbers_are_compared() -> None:
    assert exact(problem_of("complex_arithmetic"), tagged("nan", "")) == 0.0


@pytest.mark.parametrize("dataset", sorted(SEARCHING | MEANINGLESS))
def test_text_beside_the_right_answer_and_other_text_are_not_right(dataset: str) -> None:
    for index in range(5):
        problem = problem_of(dataset, index)
        right = problem.answer
        assert exact(problem, tagged(right, "so")) == 1.0
        after = (f"{right}, 99:99", f"{right} Move disk 9 from Peg 9 to Peg 9")
        around = (f"{right}zzzz", f"zzzz{right}", f"{right} zz", f"zz {right}")
        for wrong in {*after, *around, "I do not know", "0", right[:1]} - {right}:
            assert exact(problem, tagged(wrong, "")) == 0.0, wrong


def test_the_right_answer_of_another_form_stays_right() -> None:
    fraction = problem_of("fraction_simplification")
    above, below = re.findall(r"\d+", fraction.answer)
    for text in (f"{above}/{below}", f"$\\frac{{{above}}}{{{below}}}$", f" {above} / {below} "):
        assert exact(fraction, tagged(text, "")) == 1.0, text
    flips = problem_of("coin_flip")
    rational = flips.fields["entry"]["metadata"]["rational"]
    text = f"{rational['numerator']}/{rational['denominator']}"
    assert exact(flips, tagged(text, "")) == 1.0
    assert score(flips, flips.answer[:3]) == 0.0
    people = problem_of("knights_knaves")
    last, first = people.answer.rstrip(".").split(", and ")[::-1]
    assert exact(people, tagged(f"{last} and {first}", "")) == 1.0
    duration = problem_of("time_intervals")
    off = duration.answer[:-1] + str((int(duration.answer[-1]) + 1) % 10)
    assert exact(duration, tagged(off, "")) == 0.0


def test_no_letters_may_follow_a_word_of_the_quickstart() -> None:
    config: dict[str, Any] = {"min_word_len": 3, "max_word_len": 10}
    prompts = ReasoningGymPromptSettings(dataset="spell_backward", config=config)
    source = ReasoningGymSource(prompts, TOKENIZER, "words", 7)
    for problem in map(source.problem, range(50)):
        assert exact(problem, f"<>{problem.answer}") == 1.0
        assert exact(problem, f"<>{problem.answer}zzzz") == 0.0
        assert 0 < score(problem, f"{problem.answer}zzzz") < CORRECT


def test_the_options_of_a_domain_are_the_scorers_too() -> None:
    places = {"min_num_decimal_places": 6, "max_num_decimal_places": 6}
    problem = problem_of("decimal_arithmetic", **places)
    near = replace(problem, fields={**problem.fields, "config": {}})
    off = str(Decimal(problem.answer) + Decimal("0.00001"))
    assert (exact(problem, tagged(off, "")), exact(near, tagged(off, ""))) == (0.0, 1.0)


def test_a_dataset_that_is_refused_is_an_error() -> None:
    for dataset in REFUSED:
        with pytest.raises(DomainError, match=r"prompts.dataset: .* cannot be trained on"):
            problem_of(dataset)


DRAW = """
import hashlib, json, sys
from tests.stages.test_reasoning_gym_scorers import problem_of
found = {}
for name in json.loads(sys.argv[1]):
    problems = [problem_of(name, index) for index in (1,)]
    text = json.dumps([[each.prompt, each.answer] for each in problems])
    found[name] = hashlib.sha256(text.encode()).hexdigest()
print()  # after what a dataset prints
print(json.dumps(found))
"""


def test_every_dataset_draws_the_same_problems_in_every_process() -> None:
    """Draw with two seeds of Python's hashes, which change the problems of HASHED alone."""
    names = json.dumps(sorted(pinned()[1].keys() - REFUSED))
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", DRAW, names],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("0", "0", "1")
    ]
    printed = (each.communicate()[0].splitlines()[-1] for each in started)
    first, again, other = map(json.loads, printed)
    assert first == again
    assert {name for name in first if other[name] != first[name]} <= HASHED
