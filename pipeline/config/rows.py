"""Checks of a source's first rows before anything runs: stages and rewards can read them.

Only of JSONL: to read Parquet takes a library that is slow to import. `braid domain check` reads
the rest, and answers that take a library to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.text import shown
from stages.data.columns import MissingColumn, Row, RowError, renaming
from stages.data.messages import tools_of
from stages.data.prompt_template import templated, templated_conversation
from stages.data.row_forms import answer_of, conversation_of, pair_of, parsed_line, prompt_of
from stages.data.settings import (
    ConversationFileSettings,
    FilePromptSettings,
    FileSettings,
    PromptTemplateSettings,
)
from stages.kinds.dpo.settings import FilePairSettings
from stages.rewards.reward import RewardBase

MOST_ROWS, MOST_BYTES = 10_000, 16 << 20  # that are checked: a fraction of a second
MOST_ROW_BYTES = 4 << 20  # a million tokens, more than any context
SHOWN = 3
NEARLY_ALL = 0.9  # of the rows; the others may be wrong in other ways
Rewards = Mapping[str, RewardBase]


@dataclass(frozen=True)
class RowReport:
    """The check of a source's first rows.

    Of `checked` rows that are not blank, `unusable` are no rows of the source, and `unreadable` are
    rows to which a reward cannot score an answer; each is a message with its file and line. `chats`
    is true where a row has chat messages. `without` has the missing columns of unusable rows.
    """

    checked: int
    unusable: list[str]
    unreadable: list[str]
    chats: bool
    without: list[MissingColumn]

    def columns_fix(self, key: str, source: FileSettings) -> str | None:
        """Return the fix where nearly all rows lack one and the same column, else None.

        It names the file's columns and, of each absent one, that which may be meant. `key` is the
        source's, such as domains.math.prompts.
        """
        counts = Counter(error.column for error in self.without)
        column = max(counts, key=counts.__getitem__, default="")
        if not counts or (count := counts[column]) < NEARLY_ALL * self.checked:
            return None
        columns = next(error.columns for error in self.without if error.column == column)
        rows = "no row has a column"
        if count < self.checked:
            rows = f"{count:,} of the first {self.checked:,} rows lack the column"
        have = ", ".join(map(repr, columns))
        fix = renaming(key, source.columns(), columns)
        return f"{shown(source.path)}: {rows} {column!r}; columns: {have}; {fix}"

    def described(self, bad: list[str]) -> str:
        """Return the first of some bad rows, and how many there are of how many."""
        if len(bad) == 1:
            return bad[0]
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        return f"{len(bad)} of the first {self.checked} rows: {'; '.join(bad[:SHOWN])}{more}"


def row_report(
    source: FileSettings,
    rewards: Rewards | None = None,
    most: int = MOST_ROWS,
    template: PromptTemplateSettings | None = None,
) -> RowReport:
    """Return the check of the first `most` rows of a source, with the `rewards` of its domain.

    Demonstrations are in the `template` of the domain's prompts.

    Nothing is checked of Parquet. Raises OSError, with its file's name, for one that cannot be
    read.
    """
    checked, chats = 0, False
    unusable: list[str] = []
    unreadable: list[str] = []
    without: list[MissingColumn] = []
    for file, number, line in _lines(source, most):
        checked += 1
        try:
            row = _row_of(line)
            chats |= _has_messages(row, source, template)
        except RowError as error:
            unusable.append(f"{shown(file)}:{number}: {error}")
            if isinstance(error, MissingColumn):
                without.append(error)
            continue
        if why := _unreadable_answer(row, source, rewards or {}):
            unreadable.append(f"{shown(file)}:{number}: {why}")
    return RowReport(checked, unusable, unreadable, chats, without)


def _row_of(line: bytes) -> Row:
    """Return the row of a line of JSONL. Raises RowError where it has none, or a huge one."""
    if len(line) > MOST_ROW_BYTES:
        raise RowError(f"a row of more than {MOST_ROW_BYTES >> 20} MiB")
    if isinstance(row := parsed_line(line), RowError):
        raise row
    return row


def _has_messages(row: Row, source: FileSettings, template: PromptTemplateSettings | None) -> bool:
    """Return whether a row has chat messages. Raises RowError where it is no row of the source."""
    if isinstance(source, FilePairSettings):
        prompt = pair_of(row, source.prompt, source.chosen, source.rejected)[0]
    elif isinstance(source, FilePromptSettings):
        answer_of(row, source.answer)
        prompt = templated(prompt_of(row, source.prompt), source.template)
    elif isinstance(source, ConversationFileSettings):
        turns = conversation_of(row, source.messages, source.prompt, source.response)
        turns = templated_conversation(turns, template)
        prompt = turns[0] if isinstance(turns, tuple) else turns
    else:
        return False
    if not (isinstance(prompt, str) and isinstance(source, FilePromptSettings)):
        tools_of(row, source.tools, prompt)
    return not isinstance(prompt, str)


def _unreadable_answer(row: Row, source: FileSettings, rewards: Rewards) -> str | None:
    """Return why a reward cannot score an answer to a row of a source, or None."""
    if not isinstance(source, FilePromptSettings):
        return None
    answer = answer_of(row, source.answer)
    for name, reward in rewards.items():
        if why := reward.row_violation(row, answer):
            return f"reward {name}: {why}"
    return None


def _lines(source: FileSettings, most: int) -> Iterator[tuple[Path, int, bytes]]:
    """Yield the first rows that are not blank, each with its file and the number of its line."""
    left, left_bytes = most, MOST_BYTES
    for file in source.files() if source.source == "jsonl" else ():
        with file.open("rb") as lines:
            for number, line in enumerate(_starts(lines), 1):
                if left <= 0 or left_bytes <= 0:
                    return
                if line.strip():
                    left, left_bytes = left - 1, left_bytes - len(line)
                    yield file, number, line


def _starts(lines: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one with more than MOST_ROW_BYTES, its first bytes."""
    while line := lines.readline(MOST_ROW_BYTES + 1):
        yield line
        while line and not line.endswith(b"\n"):
            line = lines.readline(MOST_ROW_BYTES)
