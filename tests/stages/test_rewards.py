"""Every kind of reward on good, bad and senseless responses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from stages.data.problem import DomainError, Problem
from stages.data.prompts import PromptStream
from stages.data.settings import ReasoningGymPromptSettings
from stages.data.tokenizer import CharacterTokenizer
from stages.rewards.kinds import KINDS, RewardSettings
from stages.rewards.kinds.instruction import CHECKS
from stages.rewards.kinds.length import soft_overlong
from stages.rewards.reward import Response, Reward, RewardBase, RewardError, make, solved

GARBAGE = [
    "",
    " ",
    "\x00",
    "é" * 1000,
    "[" * 100_000,
    "<<" + " a" * 50_000,
    "\n" * 100_000,
    "\\boxed{",
    "{" * 50,
    "1" * 5000,
    "😀\u202e",
]


def settings(kind: str, **given: Any) -> RewardSettings:
    return TypeAdapter(RewardSettings).validate_python({"kind": kind, **given})


def reward(kind: str, **given: Any) -> Reward:
    return make("math", "it", settings(kind, **given), Path("/nowhere"))


def problem(answer: str = "", **fields: Any) -> Problem:
    return Problem("math", 0, "what?", answer, fields)


def explained(made: Reward, text: str, asked: Problem | None = None) -> tuple[Any, str]:
    """Return the score of a response, and what the reward says of it."""
    returned = made(asked or problem(), Response(text, len(text) + 1))
    return returned if isinstance(returned, tuple) else (returned, "")


def score(made: Reward, text: str, asked: Problem | None = None) -> Any:
    return explained(made, text, asked)[0]


def test_wrong_responses_are_explained_and_right_ones_are_not() -> None:
    sums = problem("6")
    assert explained(reward("math"), r"it is \boxed{5}", sums) == (0.0, "read 5; expected 6")
    assert explained(reward("math"), "", sums) == (0.0, "no answer found; expected 6")
    assert explained(reward("math"), r"\boxed{6}", sums) == (1.0, "")
    shape = problem(schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert explained(reward("json_schema"), '{"a": "x"}', shape) == (
        *(0.0, "$.a: 'x' is not of type 'integer'"),
    )
    assert explained(reward("json_schema"), "{", shape)[1].startswith("no JSON: ")
    asked = problem(instruction_id_list=["startend:quotation"])
    assert explained(reward("instruction"), "x", asked) == (
        *(0.0, "not followed: startend:quotation"),
    )


def test_every_kind_can_be_made_and_scores_truncated_responses() -> None:
    given: dict[str, dict[str, Any]] = {
        "judge": {"base_url": "http://localhost/v1", "model": "m", "rubric": "{response}"},
        "python": {"function": "tests.stages.small_rewards:length"},
        "overlong": {"max_tokens": 4, "buffer_tokens": 2},
        "format": {"pattern": "x"},
        "language": {"scripts": ["latin"]},
    }
    # A truncated response has no answer to judge, so a kind that scores it judges something else.
    for kind in KINDS:
        made = settings(kind, **given.get(kind, {}))
        assert made.unfinished != "score" or not made.judges_answer, kind
    assert settings("length").unfinished == "score"
    for kind in KINDS:
        assert callable(reward(kind, **given.get(kind, {})))


# Correctness


def test_reasoning_gym_gives_partial_credit_where_it_is_set() -> None:
    prompts = ReasoningGymPromptSettings(dataset="chain_sum", config={"min_terms": 3})
    [asked] = PromptStream(prompts, CharacterTokenizer(), "math", 0, "rl").take(1)
    near = f"<>{asked.answer}0"
    assert score(reward("reasoning_gym"), f"<>{asked.answer}", asked) == 1.0
    assert score(reward("reasoning_gym"), near, asked) == 0.0
    assert 0 < score(reward("reasoning_gym", credit="partial"), near, asked) < 1
    for text in [*GARBAGE, asked.answer]:
        for credit in ("whole", "partial"):
            assert score(reward("reasoning_gym", credit=credit), text, asked) == 0.0


@pytest.mark.parametrize(
    ("working", "scores"),
    [("optional", (1.0, 1.0, 1.0)), ("required", (1.0, 0.0, 0.0)), ("forbidden", (0.0, 1.0, 1.0))],
)
def test_reasoning_gym_may_require_or_forbid_shown_work(
    working: str, scores: tuple[float, ...]
) -> None:
    prompts = ReasoningGymPromptSettings(dataset="chain_sum", config={"min_terms": 3})
    [asked] = PromptStream(prompts, CharacterTokenizer(), "math", 0, "rl").take(1)
    made = reward("reasoning_gym", working=working)
    shown = (f"<1,2>{asked.answer}", f"<>{asked.answer}", f"< >{asked.answer}")
    assert tuple(score(made, text, asked) for text in shown) == scores
    for wrong in (f"<1,2>{asked.answer}1", f"<>{asked.answer}1", asked.answer, *GARBAGE):
        assert score(made, wrong, asked) == 0.0


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        (r"\frac{1}{2}", "Half of it, so $0.5$", 1),
        (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}", 1),
        ("1024", r"The answer is $2^{10}$.", 1),
        ("(1, 2)", r"\boxed{(1,2)}", 1),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        ("3", r"\boxed{4}", 0),
        ("3", "three", 0),
        ("3", "", 0),
    ],
)
def test_mathematics_is_compared_as_such(answer: str, response: str, right: int) -> None:
    assert score(reward("math"), response, problem(answer)) == right


def test_only_boxed_answers_count_with_boxed() -> None:
    assert score(reward("math", boxed=True), "it is 3", problem("3")) == 0.0
    assert score(reward("math", boxed=True), r"it is \boxed{3}", problem("3")) == 1.0


@pytest.mark.parametrize("text", GARBAGE)
def test_senseless_mathematics_is_wrong(text: str) -> None:
    assert score(reward("math"), text, problem("17")) == 0.0


@pytest.mark.parametrize("answer", ["", "  "])
def test_a_problem_without_a_readable_answer_is_an_error(answer: str) -> None:
    with pytest.raises(RewardError, match="cannot read the problem's answer"):
        score(reward("math"), "3", problem(answer))


# Instructions


@pytest.mark.parametrize(
    ("name", "arguments", "kept", "broken"),
    [
        (
            "keywords:existence",
            {"keywords": ["Sun", "sea"]},
            "The SEA, the sun.",
            "The seaside sun.",
        ),
        ("keywords:forbidden_words", {"forbidden_words": ["sun"]}, "sunny", "The Sun."),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 2, "relation": "less than"},
            "a",
            "a A",
        ),
        (
            "keywords:letter_frequency",
            {"letter": "e", "let_frequency": 2, "let_relation": "at least"},
            "Even",
            "one",
        ),
        ("length_constraints:number_words", {"num_words": 3}, "one two three", "one two"),
        (
            "length_constraints:number_words",
            {"num_words": 3, "relation": "less than"},
            "don't stop-gap",
            "one two three",
        ),
        ("length_constraints:number_sentences", {"num_sentences": 2}, "One. Two!", "Only one..."),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            "First\n\n*Then* this",
            "First\n\nNow then",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a] []"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP.S. y", "x P.S. y"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "**a**\n* b"),
        (
            "detectable_format:number_highlighted_sections",
            {"num_highlights": 2},
            "*a* **b**",
            "*a*",
        ),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Part", "num_sections": 2},
            "Part 1\nPart 2",
            "Part one",
        ),
        ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
        ("detectable_format:title", {}, "<<A title>>", "<< >>"),
        ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "why? Because", "Because"),
        ("combination:two_responses", {}, "a******b", "a******a"),
        ("startend:start_checker", {"start_phrase": "Well,"}, " well, no", "oh well,"),
        ("startend:end_checker", {"end_phrase": "The end."}, 'x the end."', "the end. x"),
        ("startend:quotation", {}, '"quoted"', '"'),
        ("change_case:capital_word_frequency", {"capital_frequency": 2}, "A BC d", "A bc d"),
        ("change_case:english_capital", {}, "ALL OF IT 1", "Most of it"),
        ("change_case:english_lowercase", {}, "all of it", "Most of it"),
        ("punctuation:no_comma", {}, "a b", "a, b"),
    ],
)
def test_an_instruction_is_kept_or_broken(
    name: str, arguments: dict[str, Any], kept: str, broken: str
) -> None:
    # As tables have it: what belongs to other instructions stands there, empty.
    row = {"instruction_id_list": [name], "kwargs": [{**arguments, "num_other": None}]}
    made = reward("instruction")
    assert score(made, kept, problem(**row)) == 1.0
    assert score(made, broken, problem(**row)) == 0.0
    for text in GARBAGE:
        assert score(made, text, problem(**row)) in (0.0, 1.0)


def test_every_instruction_is_tried_above() -> None:
    tried = test_an_instruction_is_kept_or_broken.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {case[0] for case in tried} == set(CHECKS)


def test_credit_for_all_instructions_or_for_their_share() -> None:
    row = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [None, {}],
    }
    assert score(reward("instruction"), "bare", problem(**row)) == 0.0
    assert score(reward("instruction", credit="fraction"), "bare", problem(**row)) == 0.5
    assert score(reward("instruction"), '"x"', problem(instruction_id_list=["startend:quotation"]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "must be lists of one length"),
        ({"instruction_id_list": ["a"], "kwargs": []}, "unknown instruction 'a'; known are keyw"),
        ({"instruction_id_list": ["a"], "kwargs": [{}, {}]}, "must be lists of one length"),
        (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"commas": 1}]},
            r"punctuation:no_comma does not take \{'commas': 1\}",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 1, "relation": "about"}],
            },
            r"length_constraints:number_words does not take .*'about'",
        ),
    ],
)
def test_invalid_instructions_are_errors(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(reward("instruction"), "x", problem(**row))


# Length and form


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (16384, 0), (18432, -0.5), (20480, -1), (20481, -1), (10**6, -1)],
)
def test_soft_overlong_matches_the_vectors(length: int, expected: float) -> None:
    assert soft_overlong(length, 20480, 4096) == expected
    made = reward("overlong", max_tokens=20480, buffer_tokens=4096)
    assert made(problem(), Response("", length)) == expected


@pytest.mark.parametrize(
    ("unit", "text", "expected"),
    [
        ("words", "one two", 1.0),
        ("words", "one", 0.5),
        ("words", "one two three four", 0.5),
        ("words", "", 0.0),
        ("characters", "abc", 1.0),
        ("characters", "abcdef", 0.0),
        ("tokens", "ab", 1.0),  # with its end token
    ],
)
def test_length_falls_over_its_slack(unit: str, text: str, expected: float) -> None:
    assert score(reward("length", unit=unit, at_least=2, at_most=3, slack=1), text) == expected


def test_a_format_matches_the_whole_response() -> None:
    made = reward("format", pattern=r"<think>.+</think>\d+")
    assert score(made, "<think>a\nb</think>12") == 1.0
    for text in ["<think>a</think>12!", "<think></think>1", *GARBAGE]:
        assert score(made, text) == 0.0


@pytest.mark.parametrize(
    ("scripts", "text", "expected"),
    [
        (["latin"], "Ein schöner Tag", 1.0),
        (["latin"], "good 世界", 1 / 3),  # where no spaces are written, a letter is a word
        (["han"], "世界 good", 2 / 3),
        (["han", "hiragana", "katakana"], "これは本です", 1.0),
        (["cyrillic"], "Привет, мир! Hello", 2 / 3),
        (["devanagari"], "हिन्दी भाषा", 1.0),
        (["hangul"], "안녕 세계", 1.0),
        (["latin"], "mixжed", 0.0),
        (["latin"], "12 + 3 = 15", 1.0),
        (["latin"], "", 1.0),
        (["latin"], "\uff46\uff55\uff4c\uff4c width", 1.0),
    ],
)
def test_language_is_the_share_of_words_in_the_expected_scripts(
    scripts: list[str], text: str, expected: float
) -> None:
    assert score(reward("language", scripts=scripts), text) == pytest.approx(expected)


# One's own


def test_a_function_is_imported_from_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        text = f"def constant(problem, response):\n    return {number}\n"
        (tmp_path / name / "rewards_with_a_path.py").write_text(text)
    function = "rewards_with_a_path:constant"
    made = reward("python", function=function, path=tmp_path / "two")
    assert score(made, "x") == 1
    with pytest.raises(DomainError, match=r"is imported from .*two.*not from path = .*one"):
        reward("python", function=function, path=tmp_path / "one")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such.module:exact", r"cannot import no_such\.module: ModuleNotFoundError"),
        ("tests.stages.small_rewards:exakt", "tests.stages.small_rewards has no function 'exakt'"),
        ("tests.stages.small_rewards:os", "tests.stages.small_rewards has no function 'os'"),
    ],
)
def test_a_function_that_cannot_be_loaded(function: str, message: str) -> None:
    with pytest.raises(DomainError, match=rf"domains\.math\.rewards\.it: {message}"):
        reward("python", function=function)


def test_solved_counts_the_rewards_that_judge_the_answer() -> None:
    def kinds(*given: str, weight: float = 1.0) -> dict[str, RewardBase]:
        judge = {"base_url": "http://j", "model": "m", "rubric": "{response}"}
        own: dict[str, dict[str, Any]] = {"format": {"pattern": "x"}, "judge": judge}
        return {kind: settings(kind, **own.get(kind, {}), weight=weight) for kind in given}

    both = kinds("math", "format")
    assert solved(both, {"math": 1.0, "format": 0.0})
    assert not solved(both, {"math": 0.99, "format": 1.0})
    assert solved(kinds("format"), {"format": 1.0})
    assert not solved(kinds("format"), {"format": 0.0})
    watched = {**kinds("math"), **kinds("json_schema", weight=0.0)}
    assert solved(watched, {"math": 1.0, "json_schema": 0.0})
    alone = {**kinds("format"), **kinds("math", weight=0.0)}
    assert solved(alone, {"format": 1.0, "math": 0.0})
    assert solved(alone, {"format": 1.0})  # what watches has failed
    punished = {**kinds("math"), **kinds("judge", weight=-1.0)}
    assert solved(punished, {"math": 1.0, "judge": 0.0})
