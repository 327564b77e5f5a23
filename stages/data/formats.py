"""The compact text of each reasoning-gym dataset: a prompt of a dozen characters, not a paragraph.

To add a dataset, add a `Format`. A response is `<working>answer`. Many of reasoning-gym's own
scorers give the answer to `eval` or to sympy's `parse_expr`, which runs it as code in a reward
worker: such a dataset is refused (`stages.data.reasoning_gym`), whatever its `hand_in` accepts.
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
    returns None for an invalid answer. reasoning-gym's `module` defines the dataset's config class.
    """

    module: str
    prompt: Callable[[Entry], str]
    working: Callable[[Entry], str]
    answer: Callable[[Entry], str]
    careless: Callable[[str, Random], str]
    hand_in: Callable[[str], str | None]


def _running_totals(entry: Entry) -> str:
    """Return every intermediate result, left to right: `4 - 1 - 7` gives `3,-4`."""
    first, *rest = entry["metadata"]["expression"].split()
    total, totals = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        totals.append(str(total))
    return ",".join(totals)


def _number_list(numbers: Sequence[str]) -> str:
    return ",".join(number.removesuffix(".0") for number in numbers)


def _hand_in_numbers(answer: str) -> str | None:
    """Return a JSON list of strings. Only numbers pass: a list of `nan` would score as right."""
    numbers = answer.split(",")
    return json.dumps(numbers) if all(map(NUMBER.fullmatch, numbers)) else None


def _swap_neighbours(items: Sequence[str], random: Random) -> list[str]:
    """Return `items` with two unequal neighbours swapped; where all are equal, without the last."""
    places = [i for i in range(len(items) - 1) if items[i] != items[i + 1]]
    if not places:
        return list(items[:-1])
    i = random.choice(places)
    return [*items[:i], items[i + 1], items[i], *items[i + 2 :]]


FORMATS: dict[str, Format] = {
    "chain_sum": Format(
        module="arithmetic.chain_sum",
        prompt=lambda entry: f"c{entry['metadata']['expression'].replace(' ', '')}=",
        working=_running_totals,
        answer=lambda entry: entry["answer"],
        careless=lambda answer, random: str(int(answer) + random.choice([-3, -2, -1, 1, 2, 3])),
        hand_in=lambda answer: answer if NUMBER.fullmatch(answer) else None,
    ),
    "spell_backward": Format(
        module="algorithmic.spell_backward",
        prompt=lambda entry: f"r{entry['metadata']['word'].lower()}=",
        working=lambda entry: str(entry["metadata"]["word_len"]),
        answer=lambda entry: entry["answer"].lower(),
        careless=lambda answer, random: "".join(_swap_neighbours(answer, random)),
        hand_in=lambda answer: answer,
    ),
    "number_sorting": Format(
        module="algorithmic.number_sorting",
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
