"""Problems, splits, demonstrations and scorers of reasoning-gym's datasets."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from operator import ge, gt, le, lt
from random import Random
from typing import Any

import pytest

from stages.data.compact_forms import FORMATS
from stages.data.demonstrations import demonstrate, demonstrations
from stages.data.problem import DomainError, Problem
from stages.data.prompts import PromptStream, is_held_out, split_of
from stages.data.settings import (
    GeneratedDemonstrationSettings,
    ReasoningGymPromptSettings,
)
from stages.data.tokenizer import CharacterTokenizer
from stages.rewards.kinds.reasoning_gym import exact

CONFIGS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    "spell_backward": {"min_word_len": 4, "max_word_len": 8},
    "number_sorting": {
        "min_numbers": 3,
        "max_numbers": 6,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 99,
    },
    "decimal_chain_sum": {
        "min_terms": 3,
        "max_terms": 4,
        "min_digits": 1,
        "max_digits": 1,
        "min_decimal_places": 0,
        "max_decimal_places": 0,
    },
    "palindrome_generation": {"min_length": 4, "max_length": 8},
    "number_filtering": {
        "min_numbers": 3,
        "max_numbers": 6,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 99,
    },
}
TOKENIZER = CharacterTokenizer()
every_dataset = pytest.mark.parametrize("dataset", CONFIGS)


def settings(dataset: str, **changes: Any) -> ReasoningGymPromptSettings:
    return ReasoningGymPromptSettings(dataset=dataset, config=CONFIGS[dataset] | changes)


def stream(dataset: str, *, seed: int = 0, purpose: str = "rl", **options: Any) -> PromptStream:
    return PromptStream(settings(dataset), TOKENIZER, dataset, seed, purpose, **options)


def problem_of(dataset: str, accepts: Callable[[Problem], bool] = lambda problem: True) -> Problem:
    return next(problem for problem in stream(dataset).take(2000) if accepts(problem))


# Prompts and their split


@pytest.mark.parametrize(
    ("dataset", "prompt", "worked"),
    [
        ("chain_sum", r"c\d([+-]\d){2,3}=", r"<(-?\d+,){1,2}-?\d+>-?\d+"),
        ("spell_backward", r"r[a-z0-9]{4,8}=", r"<[4-8]>[a-z0-9]{4,8}"),
        ("number_sorting", r"[ad]\d+(,\d+){2,5}=", r"<[3-6]>\d+(,\d+){2,5}"),
        ("decimal_chain_sum", r"s\d([+-]\d){2,3}=", r"<[34]>-?\d+"),
        ("palindrome_generation", r"p[a-z]{4,8}=", r"<[a-z]{4,8}>[a-z]{4,8}"),
        ("number_filtering", r"f[<>]=?\d+:\d+(,\d+){2,5}=", r"<0>\.|<[1-6]>\d+(,\d+)*"),
    ],
)
def test_prompts_and_worked_responses_read_as_the_recipe(
    dataset: str, prompt: str, worked: str
) -> None:
    for problem in stream(dataset).take(500):
        response = demonstrate(problem, True, Random(0)).response
        assert re.fullmatch(prompt, problem.prompt)
        assert re.fullmatch(worked, response)
        TOKENIZER.encode(problem.prompt + response)


def test_a_sum_is_worked_left_to_right() -> None:
    problem = problem_of("chain_sum", lambda problem: len(problem.prompt) == 9)
    totals = [
        int(total) for total in FORMATS["chain_sum"].working(problem.fields["entry"]).split(",")
    ]
    terms = [int(term) for term in re.findall(r"[+-]?\d", problem.prompt)]
    assert totals == [sum(terms[:2]), sum(terms[:3]), sum(terms[:4])]
    assert problem.answer == str(totals[-1])


def test_what_is_filtered_is_what_the_sign_keeps() -> None:
    holds = {">": gt, "<": lt, ">=": ge, "<=": le}
    signs = set()
    for problem in stream("number_filtering").take(500):
        sign, bound, numbers = re.findall(r"[<>]=?|[\d,]+", problem.prompt)
        signs.add(sign)
        kept = [each for each in numbers.split(",") if holds[sign](int(each), int(bound))]
        assert problem.answer == (",".join(kept) or ".")
    assert signs == set(holds)


def test_a_palindrome_is_worked_by_sorting_and_any_of_its_letters_is_right() -> None:
    problem = problem_of("palindrome_generation", lambda problem: len(problem.prompt) == 6)
    letters = problem.prompt[1:-1]
    assert FORMATS["palindrome_generation"].working(problem.fields["entry"]) == "".join(
        sorted(letters)
    )
    inside_out = problem.answer[1] + problem.answer[0]
    assert exact(problem, f"<>{inside_out}{inside_out[::-1]}") == 1.0


@every_dataset
def test_training_never_sees_an_evaluation_prompt(dataset: str) -> None:
    evaluated = {
        problem.key
        for seed in (0, 1)
        for problem in stream(
            dataset, seed=seed, purpose="evaluate", split="held_out"
        ).take_distinct(2000)
    }
    trained = [
        problem.key
        for seed in range(3)
        for purpose in ("cold_start", "experts", "merge")
        for problem in stream(dataset, seed=seed, purpose=purpose).take(600)
    ]
    gated = {problem.key for problem in stream(dataset, split="gate").take_distinct(500)}
    assert evaluated.isdisjoint(trained)
    assert gated.isdisjoint(evaluated)
    assert gated.isdisjoint(trained)


@every_dataset
def test_evaluation_problems_are_distinct(dataset: str) -> None:
    problems = stream(dataset, split="held_out").take_distinct(2000)
    assert len({problem.prompt for problem in problems}) == len(problems) == 2000


def test_the_split_holds_out_the_asked_fraction() -> None:
    drawn = [stream("spell_backward", split=split) for split in ("train", "held_out", "gate")]
    everything = [drawn[0].take(3000), drawn[1].take(800), drawn[2].take(200)]
    problems = [problem for each in everything for problem in each]
    share = sum(is_held_out(problem, 0.125) for problem in problems) / len(problems)
    assert share == pytest.approx(0.125, abs=0.02)
    found = Counter(split_of(problem, 0.25) for problem in problems)
    assert found == {"train": 3000, "held_out": 800, "gate": 200}
    half = settings("spell_backward").model_copy(update={"held_out_fraction": 0.5})
    trained = PromptStream(half, TOKENIZER, "spell_backward", 0, "rl", split="train").take(500)
    assert not any(is_held_out(problem, 0.5) for problem in trained)
    assert any(is_held_out(problem, 0.5) for problem in everything[0])


@every_dataset
def test_a_stream_resumes_exactly(dataset: str) -> None:
    whole = stream(dataset).take(300)
    first = stream(dataset)
    head = first.take(120)
    tail = stream(dataset, cursor=first.cursor).take(180)
    assert head + tail == whole
    assert [problem.fields for problem in head + tail] == [problem.fields for problem in whole]


def test_purposes_seeds_and_domains_draw_differently() -> None:
    streams = [
        stream("spell_backward"),
        stream("spell_backward", seed=1),
        stream("spell_backward", purpose="merge"),
        PromptStream(settings("spell_backward"), TOKENIZER, "other", 0, "rl"),
    ]
    prompts = [tuple(problem.prompt for problem in drawn.take(50)) for drawn in streams]
    assert len(set(prompts)) == len(prompts)
    shared = [len(set(a) & set(b)) for a, b in pairwise(prompts)]
    assert max(shared) < 5


@every_dataset
def test_two_thousand_held_out_problems_are_found(dataset: str) -> None:
    found = stream(dataset, split="held_out").take_distinct(2000)
    assert len({problem.prompt for problem in found}) == 2000


# Domains that cannot be trained on


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            ReasoningGymPromptSettings(dataset="chain_some"),
            r"domains\.math\.prompts\.dataset: no such dataset: chain_some; did you mean",
        ),
        (
            settings("chain_sum", min_trms=3),
            r"domains\.math\.prompts\.config\.min_trms: unknown option of chain_sum; did you",
        ),
        (
            settings("chain_sum", seed=3),
            r"domains\.math\.prompts\.config\.seed: unknown option of chain_sum",
        ),
        (
            settings("chain_sum", min_terms=9),
            r"domains\.math\.prompts\.config: chain_sum: max_terms must be >= min_t",
        ),
        (
            settings("chain_sum", min_terms="three"),
            r"domains\.math\.prompts\.config\.min_terms: should be int, not \"three\"",
        ),
        (
            settings("chain_sum", max_terms=10**9),
            r"domains\.math\.prompts\.config\.max_terms: should be between -1000 and 1000, not 10",
        ),
    ],
)
def test_wrong_settings_name_their_key(prompts: ReasoningGymPromptSettings, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        PromptStream(prompts, TOKENIZER, "math", 0, "rl")


def test_a_domain_with_no_prompts() -> None:
    wordless = settings("spell_backward", min_word_len=40, max_word_len=50)
    with pytest.raises(DomainError, match=r"domains\.words\.prompts\.config: no prompts"):
        PromptStream(wordless, TOKENIZER, "words", 0, "rl").take(1)


def test_a_domain_with_too_few_held_out_prompts() -> None:
    narrow = settings("chain_sum", min_terms=1, max_terms=1)  # ten prompts in all
    message = r"domains\.math\.prompts\.config: only \d distinct held_out prompts found, 10 needed"
    with pytest.raises(DomainError, match=message):
        PromptStream(narrow, TOKENIZER, "math", 0, "evaluate", "held_out").take_distinct(10)


# Demonstrations


@every_dataset
def test_demonstrations_are_worked_and_right_or_careless_and_wrong(dataset: str) -> None:
    shown = demonstrations(
        GeneratedDemonstrationSettings(count=2000, worked_fraction=0.45), stream(dataset), seed=0
    )
    assert len(shown) == 2000
    assert sum(example.worked for example in shown) / 2000 == pytest.approx(0.45, abs=0.035)
    for example in shown:
        assert exact(example.problem, example.response) == float(example.worked)
        assert example.response.startswith("<>") != example.worked


@every_dataset
def test_demonstrations_without_work_may_be_right(dataset: str) -> None:
    asked = GeneratedDemonstrationSettings(count=500, worked_fraction=0.5, unworked="right")
    shown = demonstrations(asked, stream(dataset), seed=0)
    assert all(exact(each.problem, each.response) == 1.0 for each in shown)
    assert {each.response.startswith("<>") for each in shown} == {True, False}


def test_demonstrations_are_a_function_of_the_seed() -> None:
    asked = GeneratedDemonstrationSettings(count=50)
    first, again, other = (
        demonstrations(asked, stream("number_sorting"), seed) for seed in (0, 0, 1)
    )
    assert first == again != other


# Rewards


@every_dataset
def test_exact_requires_the_format(dataset: str) -> None:
    problem = problem_of(dataset)
    right = f"<anything>{problem.answer}"
    assert exact(problem, right) == 1.0
    for wrong in [
        "",
        "<",
        problem.answer,
        f"<{problem.answer}",
        f">{problem.answer}",
        f"1<>{problem.answer}",
        f"<>{problem.answer}[PAD]",
        f"<>{problem.answer},{problem.answer}",
        "<>",
    ]:
        assert exact(problem, wrong) == 0.0


@pytest.mark.parametrize("item", ["nan", "NaN", "inf", "1e1", '"'])
def test_a_list_with_a_non_number_earns_nothing(item: str) -> None:
    """reasoning-gym compares floats, and nan passes every one of its comparisons."""
    problem = problem_of("number_sorting")
    count = problem.answer.count(",") + 1
    assert exact(problem, "<>" + ",".join([item] * count)) == 0.0
