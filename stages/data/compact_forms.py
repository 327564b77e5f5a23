"""The compact texts of some datasets of reasoning-gym, a dozen characters instead of a paragraph.

A model of a few million parameters reads them, with the tokenizer of characters. A response is
`<working>answer`. Never imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Entry = dict[str, Any]
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


@dataclass(frozen=True)
class Format:
    """A dataset's functions from an entry to its prompt, working, answer and a careless answer.

    `hand_in` converts a response's answer into the text that reasoning-gym's scorer reads, or
    returns None for an invalid answer.
    """

    prompt: Callable[[Entry], str]
    working: Callable[[Entry], str]
    answer: Callable[[Entry], str]
    careless: Callable[[str, Random], str]
    hand_in: Callable[[str], str | None]


def _running_totals(entry: Entry) -> str:
    """Return every intermediate result, left to right: `4 - 1 - 7` gives `3,-4`."""
    first_term, *signs_and_terms = entry["metadata"]["expression"].split()
    total, totals = int(first_term), []
    for sign, term in zip(signs_and_terms[::2], signs_and_terms[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        totals.append(str(total))
    return ",".join(totals)


def _number_list(numbers: Sequence[str]) -> str:
    return ",".join(number.removesuffix(".0") for number in numbers)


def _hand_in_numbers(answer: str) -> str | None:
    """Return a JSON list of strings. Only numbers pass: a list of `nan` would score as right."""
    numbers = answer.split(",")
    return json.dumps(numbers) if all(map(NUMBER.fullmatch, numbers)) else None


def _hand_in_list(answer: str) -> str | None:
    """Return a list as Python prints it, which the scorer compares as text; `.` is an empty one."""
    if answer == ".":
        return "[]"
    numbers = answer.split(",")
    return str(numbers) if all(map(NUMBER.fullmatch, numbers)) else None


def _off_by_some(answer: str, random: Random) -> str:
    return str(int(answer) + random.choice([-3, -2, -1, 1, 2, 3]))


def _filter_sign(entry: Entry) -> str:
    """Return the sign of the numbers that are kept: `>`, `<`, or `>=` and `<=` of a removal."""
    keep, bound = entry["metadata"]["operation"].split("_")
    if keep == "keep":
        return ">" if bound == "larger" else "<"
    return "<=" if bound == "larger" else ">="


def _swap_neighbours(items: Sequence[str], random: Random) -> list[str]:
    """Return `items` with two unequal neighbours swapped; where all are equal, without the last."""
    places = [i for i in range(len(items) - 1) if items[i] != items[i + 1]]
    if not places:
        return list(items[:-1])
    i = random.choice(places)
    return [*items[:i], items[i + 1], items[i], *items[i + 2 :]]


FORMATS: dict[str, Format] = {
    "chain_sum": Format(
        prompt=lambda entry: f"c{entry['metadata']['expression'].replace(' ', '')}=",
        working=_running_totals,
        answer=lambda entry: entry["answer"],
        careless=_off_by_some,
        hand_in=lambda answer: answer if NUMBER.fullmatch(answer) else None,
    ),
    # With no decimal places, sums and differences of integers, as chain_sum's.
    "decimal_chain_sum": Format(
        prompt=lambda entry: f"s{entry['metadata']['expression'].replace(' ', '')}=",
        working=lambda entry: str(entry["metadata"]["num_terms"]),
        answer=lambda entry: entry["answer"],
        careless=_off_by_some,
        hand_in=lambda answer: answer if NUMBER.fullmatch(answer) else None,
    ),
    "spell_backward": Format(
        prompt=lambda entry: f"r{entry['metadata']['word'].lower()}=",
        working=lambda entry: str(entry["metadata"]["word_len"]),
        answer=lambda entry: entry["answer"].lower(),
        careless=lambda answer, random: "".join(_swap_neighbours(answer, random)),
        hand_in=lambda answer: answer,
    ),
    "palindrome_generation": Format(
        prompt=lambda entry: f"p{''.join(entry['metadata']['letters'])}=",
        working=lambda entry: "".join(sorted(entry["metadata"]["letters"])),
        answer=lambda entry: entry["answer"],
        careless=lambda answer, random: answer[:-1],  # letters are missing: never right
        hand_in=lambda answer: answer,
    ),
    "number_filtering": Format(
        prompt=lambda entry: (
            f"f{_filter_sign(entry)}{entry['metadata']['filter_value']}:"
            f"{','.join(entry['metadata']['original_numbers'])}="
        ),
        working=lambda entry: str(len(entry["metadata"]["result"])),
        answer=lambda entry: ",".join(entry["metadata"]["result"]) or ".",
        careless=lambda answer, random: ",".join(_swap_neighbours(answer.split(","), random)),
        hand_in=_hand_in_list,
    ),
    "number_sorting": Format(
        prompt=lambda entry: (  # `a` for ascending, `d` for descending
            f"{entry['metadata']['direction'][0]}"
            f"{_number_list(entry['metadata']['original_numbers'])}="
        ),
        working=lambda entry: str(entry["metadata"]["numbers"]),
        answer=lambda entry: _number_list(entry["metadata"]["sorted_numbers"]),
        careless=lambda answer, random: ",".join(_swap_neighbours(answer.split(","), random)),
        hand_in=_hand_in_numbers,
    ),
}
