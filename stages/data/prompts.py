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

GATE_SHARE = 0.2  # of the held-out prompts: gates decide by these, and no report includes them
STREAM_SPACING_BITS = 32
REMEDIES = {"held_out": ", or lower evaluation.problems", "gate": ", or lower gate.problems"}


class Source(Protocol):
    """An endless source of problems, each a pure function of the seed and its index.

    `key` is the setting to fix where there are too few; the split is exhausted after `patience`
    candidates without a usable one.
    """

    key: str
    patience: int

    def problem(self, index: int) -> Problem | None:
        """Return the problem at `index`, or None where its prompt is too long."""


class PromptStream:
    """A stream of the problems of one domain, in one split, for one purpose such as a stage.

    The next problem is a pure function of the settings, the domain, the seed, the purpose and
    `cursor`, the index of the next candidate: saving that one integer saves the stream.

    The split is by content: a prompt's split is the same for every seed, purpose and domain.
    Training streams may repeat a prompt; a stream of files only after a whole epoch. `too_long`
    counts the prompts skipped because they exceed `longest` tokens or the settings' limit.
    Raises DomainError where the settings yield no problems.
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
        """Return the next `count` problems. Raises DomainError when the split is exhausted."""
        return [self._next(exclude={}) for _ in range(count)]

    def take_distinct(self, count: int) -> list[Problem]:
        """Return the next `count` problems with distinct prompts.

        Raises DomainError when the split has fewer.
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
                _report_too_long(self.domain)
            elif problem.key not in exclude:
                return problem
        skipped = f" ({self.too_long} too long)" if self.too_long else ""
        raise DomainError(
            self.domain,
            self._source.key,
            f"only {len(exclude)} distinct {self.split} prompts found{skipped}, {wanted} needed;"
            " add problems, vary them, or change prompts.held_out_fraction"
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
    """Return `count` distinct problems of the held-out or the gate split, the same in every run.

    Their prompts have at most `longest` tokens. Raises DomainError when the split has fewer.
    """
    stream = PromptStream(settings, tokenizer, domain, 0, "evaluate", split, longest=longest)
    return stream.take_distinct(count)


def split_of(problem: Problem, fraction: float) -> Split:
    """Return the split of a prompt, by its hash; `fraction` of all prompts is held out."""
    if not is_held_out(problem, fraction):
        return "train"
    return "gate" if is_held_out(problem, fraction * GATE_SHARE) else "held_out"


def is_held_out(problem: Problem, fraction: float) -> bool:
    """Return whether the prompt's hash, read as a number in [0, 1), is below `fraction`."""
    return int(problem.key, base=16) < fraction * 2**256


@cache
def _report_too_long(domain: str) -> None:  # once a process, which may have many streams
    report_notice(
        f"domains.{domain}.prompts: skipping prompts that exceed max_prompt_tokens or leave no"
        " room for a response; the metric too_long counts them"
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
    """Return a seed for reasoning-gym, at least 2^32 items away from every other stream's seed."""
    digest = sha256(f"{seed}/{domain}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8]) << STREAM_SPACING_BITS
