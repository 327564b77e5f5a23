"""Endless, resumable streams of problems; training never sees an evaluation prompt."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import Literal, Protocol

from parallel.status_pipe import report_notice
from stages.data.problem import DomainError, Problem
from stages.data.reasoning_gym_source import ReasoningGymSource
from stages.data.sources.prompt_rows import FileSource
from stages.data.sources.settings import PromptSettings, ReasoningGymPromptSettings
from stages.data.tokenizer import Tokenizer

Split = Literal["train", "held_out", "gate"]

GATE_SHARE = 0.2  # of what is not trained on: gates decide by it, and no reported number is of it
STREAM_SPACING_BITS = 32
REMEDIES = {"held_out": ", or lower evaluation.problems", "gate": ", or lower gate.problems"}


class Source(Protocol):
    """Where problems come from: without end, each a pure function of the seed and its index.

    `key` is the setting to fix where there are too few; `patience` candidates without a usable one
    mean that none is left.
    """

    key: str
    patience: int

    def problem(self, index: int) -> Problem | None:
        """The problem at `index`, or None where its prompt is too long."""


class PromptStream:
    """The problems of one domain, for one purpose (a stage, say), in one split.

    What comes next is a pure function of the settings, the domain, the seed, the purpose and
    `cursor`, the index of the next candidate: saving that one integer saves the stream.

    The split is by content: a prompt is of one whatever seed, purpose or domain drew it.
    Training streams may repeat a prompt; one of files does so only when all rows have had their
    turn. `too_long` counts the prompts that were skipped for their length: `longest` tokens is what
    there is room for, beside what the settings say.
    Raises DomainError where the settings make no problems.
    """

    def __init__(
        self,
        settings: PromptSettings,
        tokenizer: Tokenizer,
        domain: str,
        seed: int,
        purpose: str,
        split: Split = "train",
        cursor: int = 0,
        longest: int | None = None,
    ) -> None:
        self.domain = domain
        self.split: Split = split
        self.cursor = cursor
        self.too_long = 0
        self._settings = settings
        self._encode = tokenizer.encode
        self._longest = longest
        stream_seed = _stream_seed(seed, domain, purpose)
        self._source = _source(settings, tokenizer, domain, stream_seed, split)

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems. Raises DomainError when the split yields no more."""
        return [self._next(exclude={}) for _ in range(count)]

    def take_distinct(self, count: int) -> list[Problem]:
        """The next `count` problems of which no two share a prompt.

        Raises DomainError when the domain does not hold so many.
        """
        found: dict[str, Problem] = {}
        while len(found) < count:
            problem = self._next(exclude=found, wanted=count)
            found[problem.key] = problem
        return list(found.values())

    def _next(self, exclude: dict[str, Problem], wanted: int = 1) -> Problem:
        for _ in range(self._source.patience):
            problem = self._source.problem(self.cursor)
            self.cursor += 1
            if problem is not None and not self._in_split(problem):
                continue
            if problem is None or self._has_no_room(problem):
                self.too_long += 1
                _tell_of_too_long(self.domain)
            elif problem.key not in exclude:
                return problem
        skipped = f" and {self.too_long} too long ones" if self.too_long else ""
        raise DomainError(
            self.domain,
            self._source.key,
            f"only {len(exclude)} distinct {self.split} prompts{skipped} found, {wanted} needed;"
            " have more problems, more varied ones, or change prompts.held_out_fraction"
            f"{' or the limits on tokens' if self.too_long else ''}"
            f"{REMEDIES.get(self.split, '')}",
        )

    def _has_no_room(self, problem: Problem) -> bool:
        return self._longest is not None and len(self._encode(problem.prompt)) > self._longest

    def _in_split(self, problem: Problem) -> bool:
        return split_of(problem, self._settings.held_out_fraction) == self.split


def held_out_problems(
    settings: PromptSettings,
    tokenizer: Tokenizer,
    domain: str,
    count: int,
    longest: int | None = None,
    split: Split = "held_out",
) -> list[Problem]:
    """The problems a domain is evaluated on, or its gates decide by, which are others: `count`
    distinct ones of at most `longest` tokens, the same in every run.

    Raises DomainError when the split does not hold so many.
    """
    stream = PromptStream(settings, tokenizer, domain, 0, "evaluate", split, longest=longest)
    return stream.take_distinct(count)


def split_of(problem: Problem, fraction: float) -> Split:
    """The split of a prompt, by its hash, where `fraction` of all prompts is not trained on."""
    if not is_held_out(problem, fraction):
        return "train"
    return "gate" if is_held_out(problem, fraction * GATE_SHARE) else "held_out"


def is_held_out(problem: Problem, fraction: float) -> bool:
    """Whether the prompt's hash, read as a number in [0, 1), falls below `fraction`."""
    return int(problem.key, base=16) < fraction * 2**256


@cache
def _tell_of_too_long(domain: str) -> None:
    """Once a process, which may have many streams of a domain."""
    report_notice(
        f"domains.{domain}.prompts: prompts are skipped that are longer than max_prompt_tokens, or"
        " leave no room for a response; the metric too_long counts them"
    )


def _source(
    settings: PromptSettings,
    tokenizer: Tokenizer,
    domain: str,
    seed: int,
    split: Split,
) -> Source:
    if isinstance(settings, ReasoningGymPromptSettings):
        return ReasoningGymSource(settings, domain, seed)
    return FileSource(settings, tokenizer, domain, seed, split != "train")


def _stream_seed(seed: int, domain: str, purpose: str) -> int:
    """A seed for reasoning-gym, at least 2^32 items away from that of every other stream."""
    digest = sha256(f"{seed}/{domain}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8]) << STREAM_SPACING_BITS
