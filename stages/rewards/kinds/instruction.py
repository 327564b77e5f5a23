"""Verifiable instructions under the names of IFEval (arXiv 2311.07911).

A problem lists them as IFEval's data do: `instruction_id_list`, and `kwargs`, a mapping for each.
Where IFEval counts words and sentences with a trained tokenizer, these count runs of letters and
digits, and the pieces between `.`, `!` and `?`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.data.problem import Problem
from stages.rewards.kinds.format import unfenced
from stages.rewards.reward import Response, Reward, RewardError, register
from stages.rewards.settings import RewardBase

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": lambda count, bound: count >= bound,
    "less than": lambda count, bound: count < bound,
    "at most": lambda count, bound: count <= bound,
    "exactly": lambda count, bound: count == bound,
}
WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class InstructionReward(RewardBase):
    """1 where the response meets all IFEval constraints of the problem, or the share that it meets.

    The problem's fields `instruction_id_list` and `kwargs` list them (arXiv 2311.07911).
    """

    kind: Literal["instruction"] = "instruction"
    credit: Literal["all", "fraction"] = Field(
        default="all", description="all: 1 where all constraints are met; fraction: their share"
    )


@register(InstructionReward)
def make(settings: InstructionReward, _directory: Path) -> Reward:
    """Return the reward."""

    def reward(problem: Problem, response: Response) -> float:
        kept = [check() for check in _checks(problem, response.text)]
        return float(all(kept)) if settings.credit == "all" else sum(kept) / len(kept)

    return reward


def _checks(problem: Problem, text: str) -> list[Callable[[], bool]]:
    names = problem.fields.get("instruction_id_list")
    given = problem.fields.get("kwargs") or [{} for _ in names or []]
    if not names or len(names) != len(given):
        raise RewardError(
            "the problem's fields instruction_id_list and kwargs must be lists of one length, not"
            f" {names!r} and {given!r}"
        )
    return [
        _check(name, arguments or {}, text) for name, arguments in zip(names, given, strict=True)
    ]


def _check(name: str, arguments: dict[str, Any], text: str) -> Callable[[], bool]:
    check = CHECKS.get(name)
    if check is None:
        raise RewardError(f"unknown instruction {name!r}; known are {', '.join(CHECKS)}")
    # A Parquet row gives each instruction the arguments of all, null where they do not apply.
    stated = {key: value for key, value in arguments.items() if value is not None}

    def checked() -> bool:
        try:
            return check(text, **stated)
        except (TypeError, KeyError, ValueError) as error:
            raise RewardError(f"{name} does not take {stated!r}: {error}") from error

    return checked


def _named(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


def _count_of(phrase: str, text: str) -> int:
    """Return the count of a phrase as whole words, case-insensitive."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE))


@_named("keywords:existence")
def _keywords(text: str, keywords: list[str]) -> bool:
    return all(_count_of(keyword, text) for keyword in keywords)


@_named("keywords:forbidden_words")
def _forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(_count_of(word, text) for word in forbidden_words)


@_named("keywords:frequency")
def _frequency(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return RELATIONS[relation](_count_of(keyword, text), frequency)


@_named("keywords:letter_frequency")
def _letters(text: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return RELATIONS[let_relation](text.lower().count(letter.lower()), let_frequency)


@_named("length_constraints:number_words")
def _words(text: str, num_words: int, relation: str = "at least") -> bool:
    return RELATIONS[relation](len(WORD.findall(text)), num_words)


@_named("length_constraints:number_sentences")
def _sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    count = sum(WORD.search(part) is not None for part in re.split(r"[.!?]+", text))
    return RELATIONS[relation](count, num_sentences)


@_named("length_constraints:number_paragraphs")
def _paragraphs(text: str, num_paragraphs: int) -> bool:
    # IFEval's prompts ask for `***` between paragraphs.
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


@_named("length_constraints:nth_paragraph_first_word")
def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    # Empty lines divide these paragraphs.
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    first = WORD.search(parts[nth_paragraph - 1])
    return first is not None and first[0].lower() == first_word.lower()


@_named("detectable_content:number_placeholders")
def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


@_named("detectable_content:postscript")
def _postscript(text: str, postscript_marker: str) -> bool:
    return any(line.lstrip().startswith(postscript_marker) for line in text.splitlines())


@_named("detectable_format:number_bullet_lists")
def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*(?:\*(?!\*)|-)[^\S\n]*\S", text, re.MULTILINE)) == num_bullets


@_named("detectable_format:number_highlighted_sections")
def _highlights(text: str, num_highlights: int) -> bool:
    return len(re.findall(r"\*\*[^*\n]+\*\*|\*[^*\n]+\*", text)) >= num_highlights


@_named("detectable_format:multiple_sections")
def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


@_named("detectable_format:constrained_response")
def _constrained(text: str) -> bool:
    return any(option in text for option in CONSTRAINED)


@_named("detectable_format:title")
def _title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^<>\n]+)>>", text))


@_named("detectable_format:json_format")
def _json(text: str) -> bool:
    try:
        json.loads(unfenced(text))
    except (ValueError, RecursionError):
        return False
    return True


@_named("combination:repeat_prompt")
def _repeat(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@_named("combination:two_responses")
def _two(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@_named("startend:start_checker")
def _start(text: str, start_phrase: str) -> bool:
    # An addition to IFEval's list.
    return text.lstrip().lower().startswith(start_phrase.strip().lower())


@_named("startend:end_checker")
def _end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@_named("startend:quotation")
def _quotation(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


@_named("change_case:capital_word_frequency")
def _capitals(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    count = sum(word.isupper() for word in WORD.findall(text))
    return RELATIONS[capital_relation](count, capital_frequency)


@_named("change_case:english_capital")
def _upper(text: str) -> bool:
    return text.isupper()


@_named("change_case:english_lowercase")
def _lower(text: str) -> bool:
    return text.islower()


@_named("punctuation:no_comma")
def _no_comma(text: str) -> bool:
    return "," not in text
