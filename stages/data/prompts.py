"""Endless, resumable streams of problems, and the curriculum that chooses from them.

Training never sees an evaluation prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from random import Random
from typing import Any, Literal

from parallel.errors import report_notice
from stages.data.columns import Row
from stages.data.index import (
    Order,
    RowIndex,
    UnusableRow,
    build_index,
    optional_columns,
    report_unusable,
    usable,
)
from stages.data.messages import tools_of
from stages.data.problem import DomainError, Problem, content_key, seed_of
from stages.data.prompt_template import templated
from stages.data.reasoning_gym import ReasoningGymSource
from stages.data.row_forms import answer_of, prompt_of
from stages.data.settings import (
    FilePromptSettings,
    FrontierSettings,
    PromptSettings,
    ReasoningGymPromptSettings,
)
from stages.data.tokenizer import Tokenizer, TokenizerError

Split = Literal["train", "held_out", "gate"]

GATE_SHARE = 0.2  # of the held-out prompts: gates decide by these, and no report includes them
STREAM_SPACING_BITS = 32
DIFFICULTIES = 4096  # remembered at once; the least recently seen are forgotten first
REMEDIES = {"held_out": ", or lower evaluation.problems", "gate": ", or lower gate.problems"}


class PromptStream:
    """A stream of the problems of one domain, in one split, for one purpose such as a stage.

    The next problem is a pure function of the settings, the domain, the seed, the purpose and
    `cursor`, the index of the next candidate: saving that one integer saves the stream.

    The split is by content: a prompt's split is the same for every seed, purpose and domain.
    Training streams may repeat a prompt; a stream of files only after a whole epoch. `too_long`
    counts the prompts skipped because they exceed `longest` tokens or the settings' limit.
    Raises DomainError where the settings yield no problems.

    Example: of the candidates 0, 1, 2, 3 of a training stream, number 1 is held out: its hash is
    0.11 of the range, below held_out_fraction = 0.25.
        cursor = 0   take(2) returns the problems 0 and 2   cursor = 3
        A stream that is created with cursor = 3 continues with problem 3.
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
        # A seed for reasoning-gym, at least 2^32 items away from every other stream's seed.
        digest = sha256(f"{seed}/{domain}/{purpose}".encode()).digest()
        seed = int.from_bytes(digest[:8]) << STREAM_SPACING_BITS
        # A source is endless; a problem is a pure function of the seed and its index. Where
        # `patience` candidates have no usable one, `key` is the setting to fix.
        self._source: ReasoningGymSource | FileSource
        if isinstance(settings, ReasoningGymPromptSettings):
            self._source = ReasoningGymSource(settings, tokenizer, domain, seed)
        else:
            self._source = FileSource(settings, tokenizer, domain, seed, split != "train")

    def take(self, count: int) -> list[Problem]:
        """Return the next `count` problems. Raises DomainError when the split is exhausted."""
        return [self._next(exclude={}) for _ in range(count)]

    def take_distinct(self, count: int) -> list[Problem]:
        """Return the next `count` problems with distinct prompts.

        Raises DomainError when the split has fewer.
        """
        problems: dict[str, Problem] = {}
        while len(problems) < count:
            problem = self._next(exclude=problems, needed=count)
            problems[problem.key] = problem
        return list(problems.values())

    def _next(self, exclude: dict[str, Problem], needed: int = 1) -> Problem:
        for _ in range(self._source.patience):
            try:
                problem = self._source.problem(self.cursor)
            except UnusableRow as error:
                report_unusable(f"domains.{self.domain}.prompts", str(error))
                continue
            finally:
                # Also after an unusable row, which would otherwise be drawn again for ever.
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
            f"only {len(exclude)} distinct {self.split} prompts found{skipped}, {needed} needed;"
            " add problems, vary them, or change prompts.held_out_fraction"
            f"{' or the limits on tokens' if self.too_long else ''}"
            f"{REMEDIES.get(self.split, '')}",
        )

    def _in_split(self, problem: Problem) -> bool:
        return split_of(problem, self._settings.held_out_fraction) == self.split

    def _has_no_room(self, problem: Problem) -> bool:
        return self._longest is not None and len(self._encode(problem.prompt)) > self._longest


class Frontier:
    """A curriculum that prefers one domain's prompts at the frontier of what the policy can solve.

    A group whose samples are all right or all wrong teaches nothing; the samples of a prompt that
    is solved with probability p differ with variance p (1 - p). So p is estimated for every
    difficulty (a length, or the value of a field) from the stage's own samples, and of the stream's
    next candidates the one with the largest p (1 - p) is taken. p is sampled from its posterior
    instead of set to its mean (Thompson 1933), so that rare difficulties are tried.

    Endless streams and files behave alike: a row that is passed over returns after all other rows.
    With c candidates a difficulty comes at most c times as often as in the stream, and none is shut
    out: one whose share of the stream is s is taken at least s^c of the time.

    `length` counts a prompt's tokens. The choice is a pure function of the seed, the stream's
    cursor and the solve rates. Main rank only.
    """

    def __init__(
        self, settings: FrontierSettings, domain: str, length: Callable[[str], int], seed: int
    ) -> None:
        self._settings, self._domain = settings, domain
        self._length, self._seed = length, seed
        self._tallies: dict[str, tuple[float, float]] = {}  # right and wrong, oldest first
        self._passed_over = 0

    def take(self, stream: PromptStream) -> Problem:
        """Return the best of the stream's next candidates; the stream continues after the last.

        Raises DomainError when a prompt lacks the field that states its difficulty.
        """
        draw = Random(seed_of(self._seed, stream.cursor))
        candidates = stream.take(self._settings.candidates)
        self._passed_over += len(candidates) - 1

        def promise(problem: Problem) -> float:  # p (1 - p), p from Beta(1 + right, 1 + wrong)
            right, wrong = self._tallies.get(self.difficulty(problem), (0.0, 0.0))
            chance = draw.betavariate(1 + right, 1 + wrong)
            return chance * (1 - chance)

        return max(candidates, key=promise)

    def update(self, problem: Problem, right: int, wrong: int) -> None:
        """Count the samples of a prompt that solved it, and those that did not."""
        difficulty = self.difficulty(problem)
        # Popped and set again, so that the first key is the one that was not seen for longest.
        before = self._tallies.pop(difficulty, (0.0, 0.0))
        tally = before[0] + right, before[1] + wrong
        # The policy changes: older samples fade, and never outvote the newest.
        shrink = min(1.0, self._settings.memory / max(sum(tally), 1))
        self._tallies[difficulty] = tally[0] * shrink, tally[1] * shrink
        if len(self._tallies) > DIFFICULTIES:
            del self._tallies[next(iter(self._tallies))]

    def difficulty(self, problem: Problem) -> str:
        """Return the name of a prompt's difficulty."""
        if self._settings.field is None:
            step = self._settings.length_step
            return str(self._length(problem.prompt) // step * step)
        return json.dumps(self._value(problem, self._settings.field), sort_keys=True, default=str)

    def passed_over(self) -> int:
        """Return the number of prompts passed over since the last call."""
        count, self._passed_over = self._passed_over, 0
        return count

    def state(self) -> dict[str, Any]:
        """Return the solve rates and the unreported count as JSON."""
        tallies = [[name, *tally] for name, tally in self._tallies.items()]
        return {"tallies": tallies, "passed_over": self._passed_over}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._tallies = {name: (right, wrong) for name, right, wrong in state["tallies"]}
        self._passed_over = state["passed_over"]

    def _value(self, problem: Problem, field: str) -> Any:
        value: Any = problem.fields
        for name in field.split("."):
            if not isinstance(value, Mapping) or name not in value:
                field_names = (
                    ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else "none"
                )
                raise DomainError(
                    self._domain,
                    "curriculum.field",
                    f"the row of {problem.prompt!r} has no field {field}; at {name} it has"
                    f" {field_names}",
                )
            value = value[name]
        return value


class FileSource:
    """An endless source of the rows of one split, each once an epoch in a seeded order.

    Raises DomainError where the files or their rows cannot be used, or the split is empty.
    """

    key = "prompts.path"

    def __init__(
        self,
        settings: FilePromptSettings,
        tokenizer: Tokenizer,
        domain: str,
        seed: int,
        held_out: bool,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._index = prompt_index(settings, domain)
        rows = self._index.split(held_out, settings.held_out_fraction)
        self._order = Order(rows, seed)
        self.patience = 2 * len(rows)  # consecutive rows that include a whole epoch

    def problem(self, index: int) -> Problem | None:
        """Return the problem at `index`, or None where its prompt is too long.

        Raises TokenizerError, naming the row, where it cannot be rendered or encoded.
        """
        problem, tokens = problem_at(self._index, self._tokenizer, self._order.row(index), index)
        limit = self._settings.max_prompt_tokens
        return None if limit is not None and tokens > limit else problem


@cache
def prompt_index(settings: FilePromptSettings, domain: str) -> RowIndex:
    """Return the index of a domain's prompts; the files are read once a process."""
    columns = [settings.prompt, *([] if settings.answer is None else [settings.answer])]

    def parse(row: Row) -> tuple[Any, str, str]:
        prompt = templated(prompt_of(row, settings.prompt), settings.template)
        answer = answer_of(row, settings.answer)
        # A prompt of text may describe in any form the tools that its reward reads.
        tools = () if isinstance(prompt, str) else tools_of(row, settings.tools, prompt)
        return (prompt, tools, answer, row), content_key(prompt, tools), content_key(prompt)

    key, optional = f"domains.{domain}.prompts", optional_columns(settings)
    return build_index(settings, domain, key, columns, parse, optional=optional, whole=True)


def problem_at(index: RowIndex, tokenizer: Tokenizer, row: int, place: int) -> tuple[Problem, int]:
    """Return the problem of a row of the index, as number `place` of its stream, and its tokens.

    Raises TokenizerError, naming the row, where its prompt cannot be rendered or encoded, or
    UnusableRow where such rows are skipped.
    """
    prompt, tools, answer, fields = index.read(row)
    try:
        if isinstance(prompt, str):
            problem = Problem(index.domain, place, prompt, answer, fields)
        else:
            text = tokenizer.render(prompt, generation_prompt=True, tools=tools)
            problem = Problem(index.domain, place, text, answer, fields, tuple(prompt), tools)
        return problem, len(tokenizer.encode(problem.prompt))
    except TokenizerError as error:
        raise index.rejected(row, error) from error


def usable_problems(
    index: RowIndex, tokenizer: Tokenizer, rows: Iterable[int]
) -> Iterator[tuple[Problem, int]]:
    """Yield the problems of rows of the index with the numbers of their prompts' tokens.

    Those that are unusable and skipped are left out. Raises TokenizerError as `problem_at`.
    """
    for row in rows:
        problem = usable(lambda row: problem_at(index, tokenizer, row, row), row, index.key)
        if problem is not None:
            yield problem


def row_of(problem: Problem, settings: PromptSettings) -> str:
    """Return the file and the line of a problem's row; its number where it is generated."""
    if isinstance(settings, ReasoningGymPromptSettings):
        return f"problem {problem.index}"
    index = prompt_index(settings, problem.domain)
    return index.place(int(index.rows_of(problem.key)[0]))


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
