"""The check of all rows of a domain's files: answers that its rewards cannot read."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from stages.data.problem import Problem
from stages.data.prompts import prompt_index, usable_problems
from stages.data.settings import ReasoningGymPromptSettings
from stages.data.tokenizer import Tokenizer
from stages.domains import DomainSettings

READING_SECONDS = 20.0  # of all rows; the rows left are not checked
ROW_SECONDS = 5.0  # of one answer, which a library may read for ever
MOST_SLOW = 3  # answers that take longer; the rows left are not checked
SHOWN = 3


@dataclass(frozen=True)
class AnswerReport:
    """Counts of the rows read and of those with an answer no reward can use, the first with why."""

    rows: int
    checked: int
    bad: int
    first: list[str]


def answer_report(settings: DomainSettings, tokenizer: Tokenizer, domain: str) -> AnswerReport:
    """Return the report on the distinct rows of the domain's files; of no rows without any.

    Call it in the main thread. Raises DomainError and TokenizerError as the domain's streams do.
    """
    if isinstance(settings.prompts, ReasoningGymPromptSettings):
        return AnswerReport(0, 0, 0, [])
    index = prompt_index(settings.prompts, domain)
    checked, bad, slow, examples = 0, 0, 0, list[str]()
    deadline = time.monotonic() + READING_SECONDS
    for row in range(len(index.keys)):
        if time.monotonic() > deadline or slow == MOST_SLOW:
            break
        checked += 1
        for problem, _ in usable_problems(index, tokenizer, [row]):
            why, was_slow = _violation(problem, settings)
            slow += was_slow
            if why is not None:
                bad += 1
                if len(examples) < SHOWN:
                    examples.append(f"{index.place(row)}: {why}")
    return AnswerReport(len(index.keys), checked, bad, examples)


def _violation(problem: Problem, settings: DomainSettings) -> tuple[str | None, bool]:
    """Return why a reward cannot use a problem, or None; and whether it took too long to say.

    The first such reward ends the check.
    """
    for name, reward in settings.rewards.items():
        slow = False
        try:
            with _limited(ROW_SECONDS):
                why = reward.problem_violation(problem)
        except TimeoutError:
            slow = True
            why = f"reading its answer {problem.answer!r} takes more than {ROW_SECONDS:g} s"
        except Exception as error:  # a library may raise anything on an answer
            why = repr(error)
        if why is not None:
            return f"reward {name}: {why}", slow
    return None, False


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after some seconds."""

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise TimeoutError

    # A thread could not be ended: what reads the answer is a library's loop.
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
