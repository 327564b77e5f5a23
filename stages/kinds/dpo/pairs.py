"""Preference pairs of files and of collected responses, as samples in a seeded order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Protocol

import numpy as np

from parallel.files import sha256
from parallel.sample import Sample
from stages.data.arrow_rows import ROWS
from stages.data.columns import Row, RowError, column_of
from stages.data.conversations import conversation_sample, response_sample
from stages.data.index import (
    Order,
    build_index,
    optional_columns,
    probed,
    usable,
)
from stages.data.messages import tools_of
from stages.data.problem import ASSISTANT, SPLIT_DIGITS, DataError, Tool, content_key
from stages.data.row_forms import Turns, pair_of
from stages.data.settings import ToolFileSettings
from stages.data.tokenizer import Tokenizer, TokenizerError

# Columns of what a stage collected: to choose the pairs, and to read a response.
EXTREMES, SAMPLED = ("domain", "problem", "reward"), ("prompt", "token_ids", "response")


@dataclass(frozen=True)
class Pair:
    """A prompt with a preferred and another response; all are texts, or all chat messages."""

    prompt: Turns
    chosen: Turns
    rejected: Turns
    tools: tuple[Tool, ...] = ()

    def samples(self, tokenizer: Tokenizer, name: str) -> tuple[Sample, Sample]:
        """Return the prompt with each response, as samples of the source `name`."""
        chosen, rejected = (self._sample(tokenizer, name, response) for response in self.responses)
        return chosen, rejected

    @property
    def responses(self) -> tuple[Turns, Turns]:
        """The chosen and the rejected response."""
        return self.chosen, self.rejected

    def _sample(self, tokenizer: Tokenizer, name: str, response: Turns) -> Sample:
        if isinstance(self.prompt, str):
            assert isinstance(response, str)
            return response_sample(tokenizer, self.prompt, response, name)
        assert not isinstance(response, str)
        prompt_turns = sum(message["role"] == ASSISTANT for message in self.prompt)
        messages = [*self.prompt, *response]
        return conversation_sample(tokenizer, messages, name, prompt_turns, self.tools)


class PairRows(Protocol):
    """The usable pairs of a source, whose prompts are not held out."""

    def __len__(self) -> int: ...

    def digest(self) -> str:
        """Return a digest of the files' contents and of the choice of pairs from them."""

    def samples(self, row: int, tokenizer: Tokenizer, name: str) -> tuple[Sample, Sample]:
        """Return a pair's chosen and rejected sample, of the source `name`.

        Raises DataError where its file has changed.
        """

    def place(self, row: int) -> str:
        """Return a pair's file and line, for a message."""


class FilePairs:
    """The pairs of files, one a row.

    Raises DataError for unusable rows that must not be skipped, and where no row is usable.
    """

    def __init__(
        self, settings: ToolFileSettings, columns: Sequence[str], key: str, held_out_fraction: float
    ) -> None:
        """Index the files' `columns` of prompts, chosen and rejected responses."""

        def parse(row: Row) -> tuple[Pair, str, str]:
            prompt, chosen, rejected = pair_of(row, *columns)
            tools = tools_of(row, settings.tools, prompt)
            pair = Pair(prompt, chosen, rejected, tools)
            prompt_key = content_key(pair.prompt, tools)
            whole = "\0".join([prompt_key, *map(content_key, pair.responses)])
            return pair, hashlib.sha256(whole.encode()).hexdigest(), split_key(pair.prompt)

        self._columns = columns
        optional = optional_columns(settings)
        self._index = build_index(settings, "*", key, columns, parse, optional=optional)
        self._rows = self._index.split(False, held_out_fraction)

    def __len__(self) -> int:
        return len(self._rows)

    def digest(self) -> str:
        return _digest(map(sha256, self._index.files), self._columns, self._rows)

    def samples(self, row: int, tokenizer: Tokenizer, name: str) -> tuple[Sample, Sample]:
        pair: Pair = self._index.read(int(self._rows[row]))
        try:
            return pair.samples(tokenizer, name)
        except TokenizerError as error:
            raise self._index.rejected(int(self._rows[row]), error) from error

    def place(self, row: int) -> str:
        return self._index.place(int(self._rows[row]))


class CollectedPairs:
    """Each prompt's best and worst response among those that a stage collected.

    Rewards are compared within a domain: each domain has its own. Prompts whose responses have one
    reward give no pair, nor do held-out prompts. Of equal rewards the first response counts. Raises
    DataError where the file is unusable or gives no pair.
    """

    def __init__(self, file: Path, key: str, held_out_fraction: float) -> None:
        self._file, self._key = file, f"{key}.stage"
        below = ceil(held_out_fraction * 2**64)
        by_prompt: dict[tuple[str, str], _Extremes] = {}
        try:
            for at, row in ROWS["parquet"].scan(file, EXTREMES):
                if isinstance(row, RowError):
                    raise row
                problem, reward = row["problem"], row["reward"]
                if (
                    reward is not None and int(problem[:SPLIT_DIGITS], base=16) >= below
                ):  # null: it failed
                    by_prompt.setdefault((row["domain"], problem), _Extremes()).add(at, reward)
        except (OSError, RowError) as error:
            raise DataError(self._key, f"{file}: {error}") from error
        self._rows = [extremes for extremes in by_prompt.values() if extremes.high > extremes.low]
        if not self._rows:
            raise DataError(
                self._key,
                f"{file}: none of its {len(by_prompt)} prompts has responses of different rewards;"
                " sample more responses to a prompt, and keep bad ones too",
            )

    def __len__(self) -> int:
        return len(self._rows)

    def digest(self) -> str:
        places = [extremes.places for extremes in self._rows]
        return _digest([sha256(self._file)], [], np.array(places, np.int64))

    def samples(self, row: int, tokenizer: Tokenizer, name: str) -> tuple[Sample, Sample]:
        chosen, rejected = (self._sample(at, tokenizer, name) for at in self._rows[row].places)
        return chosen, rejected

    def place(self, row: int) -> str:
        best, worst = (ROWS["parquet"].place(self._file, at) for at in self._rows[row].places)
        return f"{best} and {worst}"

    def _sample(self, at: int, tokenizer: Tokenizer, name: str) -> Sample:
        """Return a response as it was sampled: truncated ones have no end token."""
        try:
            row = ROWS["parquet"].read(self._file, at, SAMPLED)
            prompt, ids = (column_of(row, name) for name in ("prompt", "token_ids"))
            if tokenizer.decode(ids) != column_of(row, "response"):
                raise RowError("its tokens are not of model.tokenizer; sample it again")
            prompt_ids = tokenizer.encode(prompt)
        except (OSError, RowError, TokenizerError) as error:
            where = ROWS["parquet"].place(self._file, at)
            raise DataError(self._key, f"{where}: {error}") from error
        return Sample(name, np.array(prompt_ids, np.int32), np.array(ids, np.int32))


def _digest(files: Iterable[str], columns: Sequence[str], rows: np.ndarray) -> str:
    """Return the digest of files' digests, the columns that are read, and the rows."""
    whole = json.dumps([list(files), list(columns), hashlib.sha256(rows.tobytes()).hexdigest()])
    return hashlib.sha256(whole.encode()).hexdigest()


@dataclass(slots=True)  # one for every prompt
class _Extremes:
    """The rows of a prompt's best and worst responses."""

    best: int = -1
    worst: int = -1
    high: float = -np.inf
    low: float = np.inf

    def add(self, at: int, reward: float) -> None:
        if reward > self.high:
            self.best, self.high = at, reward
        if reward < self.low:
            self.worst, self.low = at, reward

    @property
    def places(self) -> tuple[int, int]:
        return self.best, self.worst


@dataclass
class DrawnPair:
    """A pair's two samples, and its number in its source."""

    name: str
    row: int
    chosen: Sample
    rejected: Sample


@dataclass
class PairStream:
    """An endless stream of a source's pairs, each once an epoch in a seeded order.

    The next pair is a pure function of the source, the seed and `cursor`. `too_long` counts the
    pairs skipped for a sequence of more than `limit` tokens. A pair is tokenised when it is drawn,
    and the first PROBED at the start, so that an unusable chat template is found there; `digest` is
    of the pairs' contents, of the limit and of the tokens of those. Raises TokenizerError for such
    a template.
    """

    name: str
    rows: PairRows
    tokenizer: Tokenizer = field(repr=False)
    seed: int
    limit: int
    key: str  # of the source's settings, for messages
    cursor: int = 0
    too_long: int = 0

    def __post_init__(self) -> None:
        digest = hashlib.sha256(f"{self.rows.digest()}/{self.limit}".encode())
        for pair in probed(self._read, range(len(self.rows)), self.key):
            for sample in (pair.chosen, pair.rejected):  # of this tokenizer and its template
                for ids in (sample.prompt, sample.response, sample.learned):
                    digest.update(np.int64(len(ids)).tobytes() + ids.tobytes())
        self.digest = digest.hexdigest()
        self._order = Order(np.arange(len(self.rows)), self.seed)

    def draw(self, step: int, count: int) -> list[DrawnPair]:
        """Return the next `count` pairs that fit, independent of `step`."""
        return [self.next() for _ in range(count)]

    def next(self) -> DrawnPair:
        """Return the next pair that fits.

        Raises DataError where all are too long.
        """
        for _ in range(2 * len(self.rows)):  # consecutive rows that include a whole epoch
            row = self._order.row(self.cursor)
            self.cursor += 1
            if (pair := usable(self._read, row, self.key)) is None:
                continue
            if self._fits(pair):
                return pair
            self.too_long += 1
        raise self._all_too_long()

    def all(self) -> Iterator[DrawnPair]:
        """Yield every pair that fits once, in the order of the source.

        Raises DataError where all are too long.
        """
        any_fits = False
        for row in range(len(self.rows)):
            pair = usable(self._read, row, self.key)
            if pair is not None and self._fits(pair):
                any_fits = True
                yield pair
        if not any_fits:
            raise self._all_too_long()

    def _fits(self, pair: DrawnPair) -> bool:
        return max(pair.chosen.length, pair.rejected.length) <= self.limit

    def _all_too_long(self) -> DataError:
        why = f"every pair has a sequence of more than {self.limit} tokens; raise it"
        return DataError(f"{self.key}.max_tokens", why)

    def _read(self, row: int) -> DrawnPair:
        return DrawnPair(self.name, row, *self.rows.samples(row, self.tokenizer, self.name))


def split_key(prompt: Turns) -> str:
    """Return the hash that says whether a prompt is held out.

    That is so where the prompt is, or its turns before the first assistant turn; the lesser hash
    stands for both, since what is held out are the least hashes.
    """
    if isinstance(prompt, str):
        return content_key(prompt)
    roles = [message["role"] for message in prompt]
    opening = prompt[: roles.index(ASSISTANT)] if ASSISTANT in roles else prompt
    return min(content_key(prompt), content_key(opening)) if opening else content_key(prompt)
