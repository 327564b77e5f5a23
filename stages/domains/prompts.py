"""Endless, resumable streams of problems; training never sees an evaluation prompt."""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

from stages.domains.problem import DomainError, Problem
from stages.domains.reasoning_gym_source import ReasoningGymSource
from stages.settings import PromptSettings

Split = Literal["train", "held_out"]

SOURCES = {"reasoning_gym": ReasoningGymSource}
PATIENCE = 20_000  # candidates without a usable one before a stream is called dry
STREAM_SPACING_BITS = 32


class PromptStream:
    """The problems of one domain, for one purpose (a stage, say), in one split.

    What comes next is a pure function of the settings, the domain, the seed, the purpose and
    `cursor`, the index of the next candidate: saving that one integer saves the stream.

    The split is by content: a prompt is held out or not whatever seed, purpose or domain drew it.
    Training streams may repeat a prompt.
    Raises DomainError where the settings make no problems.
    """

    def __init__(
        self,
        settings: PromptSettings,
        domain: str,
        seed: int,
        purpose: str,
        split: Split = "train",
        cursor: int = 0,
    ) -> None:
        self.domain = domain
        self.split: Split = split
        self.cursor = cursor
        self._held_out_fraction = settings.held_out_fraction
        self._source = SOURCES[settings.source](
            settings, domain, _stream_seed(seed, domain, purpose)
        )

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
        for _ in range(PATIENCE):
            problem = self._source.problem(self.cursor)
            self.cursor += 1
            if self._in_split(problem) and problem.key not in exclude:
                return problem
        raise DomainError(
            self.domain,
            "prompts.config",
            f"only {len(exclude)} distinct {self.split} prompts found, {wanted} needed; make the"
            " problems more varied or change prompts.held_out_fraction",
        )

    def _in_split(self, problem: Problem) -> bool:
        return is_held_out(problem, self._held_out_fraction) == (self.split == "held_out")


def held_out_problems(settings: PromptSettings, domain: str, count: int) -> list[Problem]:
    """The problems a domain is evaluated on: `count` distinct ones, the same in every run.

    Raises DomainError when the held-out split does not hold so many.
    """
    return PromptStream(settings, domain, 0, "evaluate", "held_out").take_distinct(count)


def is_held_out(problem: Problem, fraction: float) -> bool:
    """Whether the prompt's hash, read as a number in [0, 1), falls below `fraction`."""
    return int(problem.key, base=16) < fraction * 2**256


def _stream_seed(seed: int, domain: str, purpose: str) -> int:
    """A seed for reasoning-gym, at least 2^32 items away from that of every other stream."""
    digest = sha256(f"{seed}/{domain}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8]) << STREAM_SPACING_BITS
