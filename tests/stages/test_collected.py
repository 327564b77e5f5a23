"""Files of collected responses: their chat messages, their damage, and their row groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from parallel.errors import UserError
from stages.data import collected
from stages.data.arrow_rows import ROWS
from stages.data.collected import prompt_columns, read_part, write_joined, write_part
from stages.data.columns import RowError
from stages.data.messages import messages_of
from stages.data.problem import Problem

ROW = {"response": "12", "reward": 1.0, "tokens": 3, "finish_reason": "stop", "dropped": None}


def chat_row(number: int, **further: Any) -> dict[str, Any]:
    messages = ({"role": "user", "content": f"{number}?", **further},)
    problem = Problem("chat", number, f"user: {number}?", "", {}, messages)
    return {**prompt_columns(problem), **ROW, "response": str(number)}


def test_chat_messages_keep_their_further_keys(tmp_path: Path) -> None:
    text = {**prompt_columns(Problem("sums", 0, "1+1=", "")), **ROW}
    parts = [[text], [chat_row(1)], [chat_row(2, name="ann"), chat_row(3)]]
    files = [tmp_path / f"{number}.parquet" for number in range(3)]
    for file, rows in zip(files, parts, strict=True):
        write_part(file, rows)
    assert write_joined(tmp_path / "all.parquet", files, only_kept=True) == 4
    found = [each["messages"] for each in parquet.read_table(tmp_path / "all.parquet").to_pylist()]
    assert found[0] is None
    assert [each[0]["content"] for each in found[1:]] == ["1?", "2?", "3?"]
    assert [each[0]["name"] for each in found[1:]] == [None, "ann", None]
    with pytest.raises(UserError, match=r"domains\.chat\.prompts\.path: its chat messages do not"):
        write_part(tmp_path / "mixed.parquet", [chat_row(1, name="ann"), chat_row(2, name=[1])])


def test_arguments_of_tool_calls_are_kept_as_they_were(tmp_path: Path) -> None:
    arguments = [{"b": 1, "a": None}, {"a": "x", "b": "y"}, {}]
    chats = [
        [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": each}}],
            },
            {"role": "tool", "content": "1"},
        ]
        for each in arguments
    ]
    problems = [Problem("chat", n, "?", "", {}, tuple(chat)) for n, chat in enumerate(chats)]
    rows = [{**prompt_columns(problem), **ROW} for problem in problems]
    write_part(tmp_path / "part.parquet", rows)
    assert write_joined(tmp_path / "all.parquet", [tmp_path / "part.parquet"], only_kept=True) == 3
    reader = ROWS["parquet"]
    found = [
        messages_of(each, "messages")
        for _, each in reader.scan(tmp_path / "all.parquet", ("messages",))
        if not isinstance(each, RowError)
    ]
    assert json.dumps(found) == json.dumps(chats)


def test_a_flipped_bit_of_a_part_changes_no_row_unnoticed(tmp_path: Path) -> None:
    part = tmp_path / "part.parquet"
    write_part(part, [chat_row(number, name=f"user{number}") for number in range(1, 9)])
    content, rows = part.read_bytes(), read_part(part)
    assert rows is not None and len(rows) == 8
    noticed = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        part.write_bytes(flipped)
        noticed += (found := read_part(part)) is None
        assert found in (None, rows), place
    assert noticed > len(content) // 2
    with pytest.raises(UserError, match=r"part\.parquet: damaged"):
        part.write_bytes(content.replace(b"user", b"uzer"))
        write_joined(tmp_path / "all.parquet", [part], only_kept=True)


def test_row_groups_do_not_depend_on_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "ROW_GROUP", 4)
    rows = [chat_row(number) for number in range(10)]
    found = []
    for name, size in (("a", 3), ("b", 5)):
        files = []
        for begin in range(0, 10, size):
            files.append(tmp_path / f"{name}_{begin}.parquet")
            write_part(files[-1], rows[begin : begin + size])
        write_joined(tmp_path / name, files, only_kept=True)
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1]
    groups = parquet.ParquetFile(tmp_path / "a").metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [4, 4, 2]
