"""Verifiable instructions under the names of IFEval (arXiv 2311.07911).

A problem lists them as IFEval's data do: `instruction_id_list`, and `kwargs`, a mapping for each.
Where IFEval counts words and sentences with a trained tokenizer, these count runs of letters and
digits, and the pieces between `.`, `!` and `?`.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.data.problem import Problem
from stages.rewards.fences import unfenced
from stages.rewards.reward import AnswerReward, Explained, Response, Reward, RewardError, register

RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "exactly": operator.eq,
}
# Arguments with their least values.
NUMBERS = {
    **dict.fromkeys(("num_paragraphs", "nth_paragraph"), 1),
    **dict.fromkeys(("frequency", "let_frequency", "capital_frequency", "num_words"), 0),
    **dict.fromkeys(("num_sentences", "num_placeholders", "num_bullets", "num_highlights"), 0),
    "num_sections": 0,
}
TEXTS = {
    *("keyword", "letter", "first_word", "postscript_marker", "section_spliter"),
    *("prompt_to_repeat", "start_phrase", "end_phrase"),
}
WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class InstructionReward(AnswerReward):
    """1 where the response meets all IFEval constraints of the problem, or the share that it meets.

    The problem's fields `instruction_id_list` and `kwargs` list them (arXiv 2311.07911).
    """

    kind: Literal["instruction"] = "instruction"
    credit: Literal["all", "fraction"] = Field(
        default="all", description="all: 1 where all constraints are met; fraction: their share"
    )

    def row_violation(self, row: Mapping[str, Any], answer: str) -> str | None:
        try:
            for name, arguments in _constraints(row):
                _is_met(name, "", arguments)
        except RewardError as error:
            return str(error)
        return None


@register(InstructionReward)
def make(settings: InstructionReward, _directory: Path) -> Reward:
    """Return the reward."""

    def reward(problem: Problem, response: Response) -> Explained:
        constraints = _constraints(problem.fields)
        are_met = [_is_met(name, response.text, arguments) for name, arguments in constraints]
        broken = [
            name for (name, _), is_met in zip(constraints, are_met, strict=True) if not is_met
        ]
        score = float(not broken) if settings.credit == "all" else sum(are_met) / len(are_met)
        return score, f"not followed: {', '.join(broken)}" if broken else ""

    return reward


def _constraints(row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return a row's instructions with their arguments. Raises RewardError where it has none."""
    names, kwargs = row.get("instruction_id_list"), row.get("kwargs")
    if isinstance(names, list) and (kwargs is None or kwargs == []):
        kwargs = [{} for _ in names]
    if (
        not isinstance(names, list)
        or not isinstance(kwargs, list)
        or not names
        or len(names) != len(kwargs)
    ):
        raise RewardError(
            "the problem's fields instruction_id_list and kwargs must be lists of one length,"
            f" not {names!r} and {kwargs!r}"
        )
    if unknown := [name for name in names if not isinstance(name, str) or name not in CHECKS]:
        raise RewardError(f"unknown instruction {unknown[0]!r}; known are {', '.join(CHECKS)}")
    constraints = [(name, arguments or {}) for name, arguments in zip(names, kwargs, strict=True)]
    if wrong := [
        (name, arguments) for name, arguments in constraints if not isinstance(arguments, dict)
    ]:
        name, arguments = wrong[0]
        raise RewardError(f"the arguments of {name} must be a mapping, not {arguments!r}")
    return constraints


def _is_met(name: str, text: str, arguments: dict[str, Any]) -> bool:
    # A Parquet row gives each instruction the arguments of all, null where they do not apply.
    stated = {key: _whole(value) for key, value in arguments.items() if value is not None}
    for key, value in stated.items():
        if requirement := _requirement(key, value):
            raise RewardError(f"{name}: {key} must be {requirement}, not {value!r}")
    if stated.get("nth_paragraph", 1) > stated.get("num_paragraphs", math.inf):
        raise RewardError(f"{name} does not take {stated!r}: no such paragraph")
    try:
        return CHECKS[name](text, **stated)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise RewardError(f"{name} does not take {stated!r}: {error}") from error


def _whole(value: Any) -> Any:
    """Return a whole number as an integer: a table with nulls has it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _requirement(key: str, value: Any) -> str:
    """Return what an argument of an instruction must be; "" where `value` is that."""
    if key in ("keywords", "forbidden_words"):
        fits = isinstance(value, list) and bool(value) and all(map(_is_text, value))
        return "" if fits else "a list of words"
    if key in NUMBERS:
        least = NUMBERS[key]
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return "" if fits else f"a whole number of at least {least}"
    return "" if key not in TEXTS or _is_text(value) else "text"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _count_of(phrase: str, text: str) -> int:
    """Return the count of a phrase as whole words, case-insensitive."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE))


def _compare(count: int, relation: str, bound: int) -> bool:
    return RELATIONS[relation](count, bound)


def _sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    count = sum(WORD.search(sentence) is not None for sentence in re.split(r"[.!?]+", text))
    return _compare(count, relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    # IFEval's prompts ask for `***` between paragraphs.
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\s?\*\*\*\s?", text)]
    return all(paragraphs[1:-1]) and sum(map(bool, paragraphs)) == num_paragraphs


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    # Empty lines divide these paragraphs.
    paragraphs = [
        paragraph.strip() for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()
    ]
    if len(paragraphs) != num_paragraphs or nth_paragraph > len(paragraphs):
        return False
    match = WORD.search(paragraphs[nth_paragraph - 1])
    return match is not None and match[0].lower() == first_word.lower()


def _capitals(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    count = sum(word.isupper() for word in WORD.findall(text))
    return _compare(count, capital_relation, capital_frequency)


def _json(text: str) -> bool:
    try:
        json.loads(unfenced(text))
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    responses = [response.strip() for response in text.split("******")]
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def _quotation(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


# The parameters beside the text are IFEval's own names of an instruction's arguments.
CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(
        _count_of(keyword, text) for keyword in keywords
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_count_of(word, text) for word in forbidden_words)
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation="at least": _compare(
        _count_of(keyword, text), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation="at least": (
        _compare(text.lower().count(letter.lower()), let_relation, let_frequency)
    ),
    "length_constraints:number_words": lambda text, num_words, relation="at least": _compare(
        len(WORD.findall(text)), relation, num_words
    ),
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": lambda text, postscript_marker: any(
        line.lstrip().startswith(postscript_marker) for line in text.splitlines()
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^[^\S\n]*(?:\*(?!\*)|-)[^\S\n]*\S", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        len(re.findall(r"\*\*[^*\n]+\*\*|\*[^*\n]+\*", text)) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:constrained_response": lambda text: any(
        answer in text for answer in CONSTRAINED
    ),
    "detectable_format:title": lambda text: any(
        title.strip() for title in re.findall(r"<<([^<>\n]+)>>", text)
    ),
    "detectable_format:json_format": _json,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "combination:two_responses": _two_responses,
    "startend:start_checker": lambda text, start_phrase: (  # an addition to IFEval's list
        text.lstrip().lower().startswith(start_phrase.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
