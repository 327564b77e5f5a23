"""Rows in the forms of public data sets: learned or shown as they say, or refused by name.

Each is written after the data set's card; the tokenizer and its template are Qwen3's own.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from pydantic import TypeAdapter

from parallel import parquet_files
from parallel.errors import UserError
from stages.data.arrow_rows import ROWS
from stages.data.demonstrations import ConversationStream, conversation_index
from stages.data.prompts import PromptStream, problem_at, prompt_index
from stages.data.settings import (
    JsonlDemonstrationSettings,
    JsonlPromptSettings,
    ParquetDemonstrationSettings,
    ParquetPromptSettings,
)
from stages.kinds.dpo.pairs import FilePairs, PairStream
from stages.kinds.dpo.settings import PairSource
from tests.stages.test_real_tokenizers import published

Row = dict[str, Any]
KEY = "stages.tuned.data.own"
NO_THOUGHTS = "<think>\n\n</think>\n\n"
END = "<|im_end|>"


def user(content: Any, **keys: Any) -> Row:
    return {"role": "user", "content": content, **keys}


def assistant(content: Any, **keys: Any) -> Row:
    return {"role": "assistant", "content": content, **keys}


def called(arguments: Any, name: str = "weather") -> Row:
    function = {"name": name, "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
TEXT_CALL = called('{"city": "Oslo"}')
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
RAIN = {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
LISTED = {"messages": "conversations"}


def write(path: Path, *rows: Row) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist([*rows]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def targets(settings: Any) -> list[tuple[str, str]]:
    """Return the prompt and the learned text of every sample of the only conversation."""
    tokenizer = published("qwen3")
    drawn = ConversationStream(settings, tokenizer, "own", 0, 1e-9, 10_000).draw(1, 1)
    decode = tokenizer.decode_prompt
    return [(decode(each.prompt), decode(each.response[each.learned])) for each in drawn]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "keys", "expected"),
    [
        # OpenAI's fine-tuning format
        ({"messages": [user("Hi"), assistant("Hello")]}, {}, ["Hello"]),
        ({"messages": [user("Hi", name="bob"), assistant("Hello")]}, {}, ["Hello"]),
        (
            {
                "messages": [
                    *(user("Hi"), assistant("No", weight=0)),
                    *(user("again"), assistant("Hello", weight=1)),
                ]
            },
            {},
            ["Hello"],
        ),
        (
            {
                "messages": [
                    *(user("Rain?"), assistant(None, tool_calls=[TEXT_CALL])),
                    *(RAIN, assistant("Yes.")),
                ],
                "tools": [WEATHER],
                "parallel_tool_calls": False,
            },
            {},
            [CALL, "Yes."],
        ),
        # Nemotron: everything as JSON text, and thoughts in a key of their own
        (
            {
                "messages": json.dumps([user("Rain?"), assistant("", tool_calls=[TEXT_CALL])]),
                "tools": json.dumps([WEATHER]),
            },
            {},
            [CALL],
        ),
        (
            {"messages": [user("2+2?"), assistant("4", reasoning_content="Two.")], "tools": "[]"},
            {},
            ["<think>\nTwo.\n</think>\n\n4"],
        ),
        (
            {"input": [user("2+2?")], "output": "<think>\nx\n</think>\n4", "reasoning": "on"},
            {"prompt": "input", "response": "output"},
            ["<think>\nx\n</think>\n\n4"],
        ),
        # Hermes: tools in the system's message, calls in the content
        (
            {
                "messages": [
                    {"role": "system", "content": '<tools>[{"name": "weather"}]</tools>'},
                    *(user("Rain?"), assistant(CALL)),
                ],
                "tools": json.dumps([WEATHER["function"]]),
            },
            {},
            [CALL],
        ),
        # xLAM: a flat list of tools as text
        (
            {
                "messages": [
                    user("Rain?"),
                    assistant("", tool_calls=[{"name": "weather", "arguments": {"city": "Oslo"}}]),
                ],
                "tools": '[{"name": "weather", "parameters": {"city": {"type": "str"}}}]',
            },
            {},
            [CALL],
        ),
        # UltraChat, tulu-3, OpenThoughts
        (
            {
                "prompt": "Hi",
                "messages": [user("Hi"), assistant("Hello"), user("more"), assistant("again")],
            },
            {},
            ["Hello", "again"],
        ),
        (
            {"conversations": [user("2+2?"), assistant("<think>\nx\n</think>\n\n4")], "id": 1},
            LISTED,
            ["<think>\nx\n</think>\n\n4"],
        ),
        # Two tools, whose arguments Parquet keeps in one struct
        (
            {
                "messages": [
                    user("Rain?"),
                    assistant(
                        "",
                        tool_calls=[called({"city": "Oslo"}), called({"zone": "CET"}, "clock")],
                    ),
                ],
                "tools": [WEATHER, CLOCK],
            },
            {},
            [CALL + CALL.replace("weather", "clock").replace('city": "Oslo', 'zone": "CET')],
        ),
    ],
)
def test_every_turn_of_a_public_form_is_learned(
    tmp_path: Path, suffix: str, row: Row, keys: Row, expected: list[str]
) -> None:
    path = write(tmp_path / f"rows.{suffix}", row)
    jsonl, arrow = JsonlDemonstrationSettings, ParquetDemonstrationSettings
    found = targets((jsonl if suffix == "jsonl" else arrow)(path=path, **keys))
    wanted_texts = [
        f"{text if '<think>' in text else NO_THOUGHTS + text}{END}" for text in expected
    ]
    assert [target.replace("</tool_call>\n<", "</tool_call><") for _, target in found] == (
        wanted_texts
    )
    shown = ["<tools>" in prompt for prompt, _ in found]
    assert shown == [row.get("tools") not in (None, "[]")] * len(expected)


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
            LISTED,
            "number 1, whose role is not text; its keys: from, value",
        ),
        (
            {"messages": [user("a"), assistant(None, function_call={"name": "weather"})]},
            {},
            "number 2, whose content is not text",
        ),
        ({"messages": [user([{"type": "text", "text": "a"}])]}, {}, "whose content is not text"),
        ({"messages": str([user("a"), assistant("b")])}, {}, "looks like chat messages as text"),
        (
            {"messages": [user("a"), assistant("", tool_calls=[called("city=Oslo")])]},
            {},
            "call of 'weather' has arguments that are neither an object nor JSON text of one",
        ),
        (
            {"messages": [user("a"), assistant("", tool_calls=[called("[1]")])]},
            {},
            "call of 'weather' has arguments that are not an object",
        ),
        *(
            (
                {"messages": [user("a"), assistant("", tool_calls=[called(arguments)])]},
                {},
                "number 2, whose call of 'weather' has arguments that are not JSON: ",
            )
            for arguments in (
                '{"a": NaN}',
                '{"a": 1e999}',
                '{"a": "\\ud800"}',
                {"a": [math.inf]},
            )
        ),
        (
            {"messages": [user("a"), assistant("b")], "tools": '[{"name": "f", "a": NaN}]'},
            {},
            "'tools' has tools that are not JSON: ",
        ),
        (
            {"messages": [user("a"), assistant("b")], "tools": ["weather"]},
            {},
            "'tools' is not a list of tools",
        ),
        (
            {"messages": [user("a"), assistant("b", weight=0)]},
            {},
            "has no assistant turn to train on",
        ),
        (
            {"messages": [user("a"), assistant("b", weight=0.5)]},
            {},
            "weight is neither 0 nor 1",
        ),
        (
            {"query": "Rain?", "answers": "[]", "tools": json.dumps([WEATHER["function"]])},
            {"prompt": "query", "response": "answers"},
            "'tools' has tools that a prompt of text does not show",
        ),
        (
            {"messages": [{"role": "developer", "content": "x"}, user("a"), assistant("b")]},
            {},
            "leaves out message 1, of the role developer, 'x'",
        ),
    ],
)
def test_what_cannot_be_learned_as_it_says_is_refused_with_its_line(
    tmp_path: Path, row: Row, keys: Row, message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(UserError) as error:
        targets(JsonlDemonstrationSettings(path=path, **keys))
    assert message in str(error.value)
    assert f"{path}:1" in str(error.value)


@pytest.mark.parametrize("wrap", [list, json.dumps])
def test_prompts_and_pairs_show_their_tools(tmp_path: Path, wrap: Any) -> None:
    tokenizer, tools = published("qwen3"), wrap([WEATHER])
    path = write(tmp_path / "p.jsonl", {"prompt": wrap([user("Rain?")]), "tools": tools})
    settings = JsonlPromptSettings(path=path, held_out_fraction=1e-9)
    [problem] = PromptStream(settings, tokenizer, "own", 0, "rl").take(1)
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in problem.prompt
    assert problem.tools == (WEATHER,)
    without = settings.model_copy(update={"tools": None})
    [bare] = PromptStream(without, tokenizer, "own", 0, "rl").take(1)
    assert bare.prompt == "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n"
    pair = {
        "prompt": wrap([user("Rain?")]),
        "chosen": wrap([assistant(None, tool_calls=[TEXT_CALL])]),
        "rejected": wrap([assistant("No.")]),
        "tools": tools,
    }
    source: Any = TypeAdapter(PairSource).validate_python(
        {"source": "jsonl", "path": str(write(tmp_path / "d.jsonl", pair))}
    )
    rows = FilePairs(source, ("prompt", "chosen", "rejected"), KEY, 1e-9)
    drawn = PairStream("own", rows, tokenizer, 0, 10_000, KEY).next()
    assert tokenizer.decode_prompt(drawn.chosen.prompt) == problem.prompt
    assert tokenizer.decode_prompt(drawn.chosen.response) == f"{NO_THOUGHTS}{CALL}{END}"
    assert tokenizer.decode_prompt(drawn.rejected.response) == f"{NO_THOUGHTS}No.{END}"


def test_a_question_with_other_tools_is_no_repetition(tmp_path: Path) -> None:
    tokenizer, clock = published("qwen3"), {**WEATHER["function"], "name": "clock"}
    other = {"type": "function", "function": clock}
    turns = [user("Rain?"), assistant("No.")]
    row = {"prompt": [turns[0]], "messages": turns, "chosen": "No.", "rejected": "?"}
    rows = [{**row, "tools": [each]} for each in (WEATHER, other, WEATHER)] + [row]
    path = write(tmp_path / "rows.jsonl", *rows)
    # Both sets of tools and none: three problems on one side of the split.
    index = prompt_index(JsonlPromptSettings(path=path), "own")
    assert index.counts.duplicates == 1
    problems = [problem_at(index, tokenizer, number, number)[0] for number in range(3)]
    assert [problem.tools for problem in problems] == [(WEATHER,), (other,), ()]
    assert len({problem.key for problem in problems}) == 3
    bare = hashlib.sha256(b"Rain?").hexdigest()  # as before there were tools
    assert problems[2].key == bare
    assert {problem.key[:16] for problem in problems} == {bare[:16]}
    assert index.keys.tolist() == 3 * [int(bare[:16], 16)]
    shown = JsonlDemonstrationSettings(path=path)
    assert conversation_index(shown, "own").counts.duplicates == 1
    source: Any = TypeAdapter(PairSource).validate_python({"source": "jsonl", "path": str(path)})
    assert len(FilePairs(source, ("prompt", "chosen", "rejected"), KEY, 1e-9)) == 3


def stamped(path: Path, *, prompts: list[Any], **columns: Any) -> ParquetPromptSettings:
    table = pyarrow.table({"prompt": prompts, "answer": ["1"] * len(prompts), **columns})
    parquet.write_table(table, path, row_group_size=10)
    return ParquetPromptSettings(path=path, answer="answer", held_out_fraction=1e-9)


def test_a_parquet_column_that_nothing_reads_is_not_converted(tmp_path: Path) -> None:
    stamps = pyarrow.array([1704067200000000001] * 40, pyarrow.timestamp("ns"))
    settings = stamped(tmp_path / "a.parquet", prompts=[f"q{n}" for n in range(40)], seen=stamps)
    problems = PromptStream(settings, published("qwen3"), "own", 0, "rl").take(40)
    assert {problem.prompt for problem in problems} == {f"q{n}" for n in range(40)}
    assert problems[0].fields.keys() == {"prompt", "answer"}


def test_a_long_text_of_many_rows_is_read_as_it_is_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound on what a table decodes to is none on a file whose rows are read one by one."""
    for bound in ("MOST_BYTES", "MOST_TABLE_BYTES"):
        monkeypatch.setattr(parquet_files, bound, 1 << 20)
    system = "You may call tools. " * 2000
    chats = [
        [{"role": "system", "content": system}, {"role": "user", "content": str(number)}]
        for number in range(200)  # 8 MB in one row group
    ]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": chats, "system": [system] * 200}), file)
    for columns in (("prompt",), None):
        row = ROWS["parquet"].read(file, 199, columns)
        assert row["prompt"] == chats[-1] and row.get("system", system) == system


def test_two_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    twice = pyarrow.table([["a"], ["b"], ["1"]], names=["prompt", "prompt", "answer"])
    parquet.write_table(twice, path)
    settings = ParquetPromptSettings(path=path, answer="answer")
    with pytest.raises(UserError, match=r"a\.parquet: has two columns 'prompt'; rename one"):
        PromptStream(settings, published("qwen3"), "own", 0, "rl")


def test_a_row_that_the_template_rejects_is_skipped_where_bad_rows_are(tmp_path: Path) -> None:
    prompts = [user("a"), {"role": "developer", "content": "x"}, user("b")]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": [each]}) + "\n" for each in prompts))
    settings = JsonlPromptSettings(path=path, held_out_fraction=1e-9)
    with pytest.raises(UserError, match=r"leaves out message 1.*; in .*a\.jsonl:2"):
        PromptStream(settings, published("qwen3"), "own", 0, "rl").take(3)
    skipping = settings.model_copy(update={"on_bad_row": "skip"})
    stream = PromptStream(skipping, published("qwen3"), "own", 0, "rl")
    asked = {problem.messages[0]["content"] for problem in stream.take(6) if problem.messages}
    assert asked == {"a", "b"}
    assert (stream.too_long, stream.cursor > 6) == (0, True)
