"""Datasets of reasoning-gym (0.1.25) whose scorers give all to more than the right text.

Some search the text for the answer and ignore what stands around it; some add up what is right in
it, and never see the end; two give 1 to nearly any text. Never imports torch.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MOST_OF_A_WRONG = 0.99  # below what `credit: whole` takes as right
# One text is right, but for its case and white space.
ONE_TEXT = {"game_of_life_halting", "letter_jumble", "spell_backward"}
# Where any text, or any prefix of the number, is right: partial credit means nothing.
MEANINGLESS = {"coin_flip", "game_of_life_halting"}
CLOSE = 1e-3  # relative error of a probability; the scorer's 1e-4 takes 0 for a small one
# What a whole answer looks like, of which the scorer reads a part.
FORMS = {
    "fraction_simplification": (
        r"\$*\s*(\\d?frac\s*{\s*\d+\s*}\s*{\s*\d+\s*}|\d+\s*/\s*\d+)\s*\$*"
    ),
    "gsm_symbolic": r"\d+(\.\d*)?",
    "kakurasu": r"[01\s,\[\]]+",
    "quantum_lock": r"[ABC\s,→>-]+",
    "sokoban": r"[DLRU\s]+",
    "survo": r"[\d\s]+",
    "time_intervals": r"\d+( days?)?(, \d+:\d+(:\d+)?)?|\d+:\d+(:\d+(\.\d+)?)?",
    # A line's first move alone is read.
    "tower_of_hanoi": r"Move disk \d+ from Peg \d+ to Peg \d+\.?"
    r"(\s*\n\s*Move disk \d+ from Peg \d+ to Peg \d+\.?)*",
}
# Statements in any order, of the answer's words and these.
STATEMENTS = {"knights_knaves"}
SMALL_WORDS = {"a", "an", "and", "is"}
SEARCHING = ONE_TEXT | STATEMENTS | FORMS.keys()


def whole_answer_score(dataset: str, score: float, text: str, answer: str) -> float:
    """Return a scorer's score of `text`, less than 1 where it is not the whole right answer.

    `score` is within [0, 1] and `answer` the entry's. Scores of other datasets are as they were,
    and so is that of every text that the scorer does not take as right.
    """
    if score == 1 and _is_whole(dataset, text.strip(), answer):
        return score
    if dataset in MEANINGLESS:
        return 0.0
    return min(score, MOST_OF_A_WRONG) if dataset in SEARCHING else score


def _is_whole(dataset: str, text: str, answer: str) -> bool:
    if dataset in ONE_TEXT:
        return text.casefold().split() == answer.casefold().split()
    if dataset in STATEMENTS:
        return _words(text) <= _words(answer) | SMALL_WORDS
    if dataset == "coin_flip":
        return math.isclose(Fraction(text.replace(",", "")), Fraction(answer), rel_tol=CLOSE)
    if dataset == "time_intervals" and ("," in text) != ("," in answer):
        return False  # of an answer in days what follows a comma is not read
    form = FORMS.get(dataset)
    return form is None or re.fullmatch(form, text, re.IGNORECASE) is not None


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))
