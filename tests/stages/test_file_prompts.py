"""Prompts from files: their order, their split, what is skipped, and what a fault says."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from stages.data.messages import messages_of
from stages.data.problem import DomainError, Problem
from stages.data.prompts import PromptStream, held_out_problems, is_held_out, prompt_index
from stages.data.row_forms import prompt_of
from stages.data.rows import ParquetRows
from stages.data.settings import (
    ArrowPromptSettings,
    JsonlPromptSettings,
    ParquetPromptSettings,
    ReasoningGymPromptSettings,
)
from stages.data.tokenizer import CharacterTokenizer, TokenizerError
from stages.domain_tools.domain_check import length_report

TOKENIZER = CharacterTokenizer()
Write = Callable[..., Path]


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Text and chat in turn, all different, of many lengths."""
    random = Random(seed)
    made = []
    for number in range(count):
        question = f"{number}: " + "x" * random.randrange(30)
        chat = [{"role": "system", "content": "add"}, {"role": "user", "content": question}]
        made.append({"prompt": chat, "answer": str(number), "level": number % 5})
    return made


def write_jsonl(path: Path, made: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def write_parquet(path: Path, made: list[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(made), path, row_group_size=7)
    return path


def write_arrow(path: Path, made: list[dict[str, Any]], *, stream: bool = True) -> Path:
    table = pyarrow.Table.from_pylist(made)
    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with new(str(path), table.schema) as batches:
        batches.write_table(table, max_chunksize=7)
    return path


def jsonl(path: Path, **more: Any) -> JsonlPromptSettings:
    return JsonlPromptSettings(path=path, answer="answer", **more)


def stream(settings: Any, seed: int = 0, **options: Any) -> PromptStream:
    return PromptStream(settings, TOKENIZER, "math", seed, "rl", **options)


def seen(problems: list[Problem]) -> list[tuple[int, str, str]]:
    return [(problem.index, problem.prompt, problem.answer) for problem in problems]


def test_jsonl_parquet_and_arrow_agree_row_for_row(tmp_path: Path) -> None:
    made = rows(60)
    one = jsonl(write_jsonl(tmp_path / "a.jsonl", made))
    others = [
        ParquetPromptSettings(path=write_parquet(tmp_path / "a.parquet", made), answer="answer"),
        *(
            ArrowPromptSettings(
                path=write_arrow(tmp_path / f"{form}.arrow", made, stream=form == "stream"),
                answer="answer",
            )
            for form in ("stream", "file")
        ),
    ]
    for split in ("train", "held_out"):
        ours = stream(one, split=split).take(100)
        for other in others:
            theirs = stream(other, split=split).take(100)
            assert seen(ours) == seen(theirs)
            assert [each.fields for each in ours] == [each.fields for each in theirs]
            assert [each.key for each in ours] == [each.key for each in theirs]


@pytest.mark.parametrize("damage", ["short", "text", "offsets"])
def test_a_damaged_arrow_file_is_an_error(damage: str, tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", [{"prompt": f"{n}+1="} for n in range(20)])
    content = path.read_bytes()
    if damage == "offsets":  # of the texts: 0, 4, 8 ... as int32
        offsets = b"".join((4 * n).to_bytes(4, "little") for n in range(8))
        assert content.count(offsets) == 1  # of the first batch
        content = content.replace(offsets, offsets[:-4] + (1 << 30).to_bytes(4, "little"))
    path.write_bytes({"short": content[:-400], "text": b"no Arrow", "offsets": content}[damage])
    with pytest.raises(DomainError, match=r"math\.prompts: .*a\.arrow: cannot be read as Arrow: "):
        stream(ArrowPromptSettings(path=path))


def test_a_row_keeps_its_fields_and_its_chat_is_rendered(tmp_path: Path) -> None:
    settings = jsonl(write_jsonl(tmp_path / "a.jsonl", rows(3)), held_out_fraction=1e-9)
    problem = min(stream(settings).take(3), key=lambda each: each.answer)
    assert problem.prompt.startswith("system: add user: 0: ")
    assert problem.prompt.endswith(" assistant: ")
    assert (problem.answer, problem.fields["level"]) == ("0", 0)
    assert problem.messages is not None
    assert problem.messages[0] == {"role": "system", "content": "add"}


def test_an_epoch_has_every_training_row_once_in_a_new_order(tmp_path: Path) -> None:
    settings = jsonl(write_jsonl(tmp_path / "a.jsonl", rows(80)))
    held = {each.key for each in held_out_problems(settings, TOKENIZER, "math", 15)}
    size = len(prompt_index(settings, "math").split(False, 0.25))
    drawn = [problem.answer for problem in stream(settings).take(3 * size)]
    epochs = [drawn[start : start + size] for start in range(0, 3 * size, size)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert all(len(set(epoch)) == size for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [problem.answer for problem in stream(settings, seed=1).take(size)] != epochs[0]
    assert held.isdisjoint(problem.key for problem in stream(settings).take(size))


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_stream_resumes_exactly_at_any_cursor(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "a", rows(50))
    kind = JsonlPromptSettings if write is write_jsonl else ParquetPromptSettings
    settings = kind(path=path, answer="answer", max_prompt_tokens=45)
    whole = stream(settings).take(120)
    random = Random(write.__name__)
    for taken in [0, 1, 119, *(random.randrange(120) for _ in range(8))]:
        first = stream(settings)
        head = first.take(taken)
        tail = stream(settings, cursor=first.cursor).take(120 - taken)
        assert seen(head + tail) == seen(whole)
        if taken:  # a prompt that was begun is found again by its index
            [again] = stream(settings, cursor=head[-1].index).take(1)
            assert seen([again]) == seen(head[-1:])


def test_training_never_sees_a_held_out_prompt_under_any_seed_or_format(tmp_path: Path) -> None:
    made = rows(200)
    one = jsonl(write_jsonl(tmp_path / "a.jsonl", made))
    other = ParquetPromptSettings(path=write_parquet(tmp_path / "a.parquet", made))
    evaluated = {each.key for each in held_out_problems(one, TOKENIZER, "math", 35)}
    for settings in (one, other):
        for seed in range(3):
            drawn = stream(settings, seed=seed).take(300)
            assert evaluated.isdisjoint(each.key for each in drawn)
    texts = [{"prompt": row["prompt"][1]["content"]} for row in made]
    chats = [{"prompt": row["prompt"][1:]} for row in made]
    as_text = JsonlPromptSettings(path=write_jsonl(tmp_path / "t.jsonl", texts))
    as_chat = JsonlPromptSettings(path=write_jsonl(tmp_path / "c.jsonl", chats))
    held = {each.key for each in held_out_problems(as_text, TOKENIZER, "math", 35)}
    assert held.isdisjoint(each.key for each in stream(as_chat).take(300))


def test_repeated_rows_are_dropped_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = jsonl(tmp_path, held_out_fraction=1e-9)
    write_jsonl(tmp_path / "a.jsonl", rows(20) + rows(5))
    write_jsonl(tmp_path / "b.jsonl", rows(8))
    write_parquet(tmp_path / "c.parquet", rows(50))  # of another format
    counts = prompt_index(settings, "math").counts
    assert (counts.rows, counts.bad, counts.duplicates) == (33, 0, 13)
    assert len({problem.answer for problem in stream(settings).take(20)}) == 20
    assert "domains.math.prompts: skipped rows, of 33: 13 repeated" in capfd.readouterr().err


@pytest.mark.parametrize(("stated", "room"), [(0, None), (None, 0), (0, 9), (9, 0)])
def test_prompts_over_the_limit_are_skipped_and_counted(
    stated: int | None, room: int | None, tmp_path: Path
) -> None:
    """The limit is the settings' or the room in the context, whichever is less."""
    path = write_jsonl(tmp_path / "a.jsonl", rows(40))
    lengths = {row["answer"]: len(row["prompt"][1]["content"]) + 30 for row in rows(40)}
    limit = sorted(lengths.values())[30]
    most, longest = (None if more is None else limit + more for more in (stated, room))
    settings = jsonl(path, held_out_fraction=1e-9, max_prompt_tokens=most)
    drawing = stream(settings, longest=longest)
    short = sum(length <= limit for length in lengths.values())
    drawn = drawing.take(short)
    assert {each.answer for each in drawn} == {n for n, size in lengths.items() if size <= limit}
    assert max(len(TOKENIZER.encode(each.prompt)) for each in drawn) == limit
    drawing.take(1)  # the next epoch
    assert drawing.too_long >= 40 - short
    with pytest.raises(DomainError, match=r"domains\.math\.prompts\.path: only 0 .*too long"):
        stream(jsonl(path, max_prompt_tokens=3)).take(1)


@pytest.mark.parametrize("kind", ["files", "reasoning_gym"])
def test_prompts_that_leave_no_room_are_skipped_and_counted(tmp_path: Path, kind: str) -> None:
    settings: Any = jsonl(write_jsonl(tmp_path / "a.jsonl", rows(40)), held_out_fraction=1e-9)
    if kind == "reasoning_gym":
        settings = ReasoningGymPromptSettings(dataset="chain_sum", held_out_fraction=1e-9)
    lengths = sorted(len(TOKENIZER.encode(each.prompt)) for each in stream(settings).take(40))
    limit = lengths[20]
    drawing = stream(settings, longest=limit)
    drawn = drawing.take(20)
    assert max(len(TOKENIZER.encode(each.prompt)) for each in drawn) <= limit
    assert drawing.too_long == drawing.cursor - 20 > 0
    [again] = stream(settings, cursor=drawn[-1].index, longest=limit).take(1)
    assert seen([again]) == seen(drawn[-1:])
    with pytest.raises(DomainError, match=r"only 0 .* \(\d+ too long\), .* limits on tokens"):
        stream(settings, longest=1).take(1)


BAD_LINES = [
    (
        '{"prompt": "\udcff"}',
        "not UTF-8: 'utf-8' codec can't decode byte 0xff in position 12: invalid start byte",
    ),
    (
        f'{{"prompt": "1", "answer": {"1" * 5000}}}',
        "has a number of more than 4,300 digits; write it as text",
    ),
    (
        '{"prompt": "1", "answer": 1e99999}',
        "'answer' is a number of more than 4,300 digits; write it as text",
    ),
    (f'{{"prompt": "1", "answer": 1e{"9" * 20}}}', "'answer' is neither text nor a finite number"),
    ("[" * 100_000, "nested too deeply"),
    ('{"prompt": "1+1=", "answer"}', "not valid JSON: Expecting ':' delimiter at column 28"),
    ("1", "not a JSON object"),
    ('[{"prompt": "1+1=", "answer": 2}]', "a JSON array; write one object a line"),
    ("[", "a JSON array; write one object a line"),
    ('[{"prompt": "1+1="},', "a JSON array; write one object a line"),
    ("[1, x]", "not valid JSON: Expecting value at column 5"),
    (
        '{"question": "1+1="}',
        "no column 'prompt'; columns: 'question'; the nearest: 'question'",
    ),
    ('{"prompt": "1+1="}', "no column 'answer'; columns: 'prompt'"),
    ('{"prompt": "1+1=", "answer": NaN}', "'answer' is neither text nor a finite number"),
    (
        '{"prompt": "\\ud83d", "answer": "2"}',
        "half of a surrogate pair, which is not text",
    ),
    ('{"prompt": "", "answer": "2"}', "'prompt' is blank"),
    ('{"prompt": " \\n\\t", "answer": "2"}', "'prompt' is blank"),
    (
        '{"prompt": [{"role": "user", "content": " "}], "answer": "2"}',
        "'prompt' has only blank messages",
    ),
    ('{"prompt": 3, "answer": "2"}', "'prompt' is neither text nor a list of messages"),
    ('{"prompt": "1+1=", "answer": [2]}', "'answer' is neither text nor a finite number"),
    (
        '{"prompt": [{"role": "user", "content": null}], "answer": "2"}',
        "'prompt' has a message, number 1, whose content is not text",
    ),
    (
        '{"prompt": [{"role": "assistant", "content": "a"}], "answer": "2"}',
        "'prompt' must not end with an assistant turn",
    ),
    (
        '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],'
        ' "answer": "2"}',
        "'prompt' must not end with an assistant turn",
    ),
    ('{"prompt": "1+1=", "answer": true}', "'answer' is neither text nor a finite number"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_row_stops_with_file_and_line_or_is_counted(
    tmp_path: Path, line: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    text = f'{{"prompt": "0+1=", "answer": 1}}\n\n{line}\n{{"prompt": "2", "answer": 4}}'
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DomainError) as caught:
        stream(jsonl(path))
    fix = "fix it, or skip such rows with domains.math.prompts.on_bad_row: skip"
    assert str(caught.value) == f"domains.math.prompts: {path}:3: {message}; {fix}"
    skipping = jsonl(path, on_bad_row="skip", held_out_fraction=1e-9)
    assert sorted(problem.answer for problem in stream(skipping).take(2)) == ["1", "4"]
    assert prompt_index(skipping, "math").counts.bad == 1
    assert f"1 unusable ({path}:3: {message})" in capfd.readouterr().err


def test_one_message_that_is_not_blank_is_enough() -> None:
    system, user = {"role": "system", "content": ""}, {"role": "user", "content": "1+1="}
    assert prompt_of({"prompt": [system, user]}, "prompt") == [system, user]


def test_null_keys_of_messages_are_as_if_missing() -> None:
    """Parquet cannot omit a key of one message that another one has."""
    user = {"role": "user", "content": "1+1="}
    assert messages_of({"chat": [{**user, "name": None}]}, "chat") == [user]


def test_a_compressed_file_is_named_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "1+1=", "answer": 2}\n'))
    with pytest.raises(DomainError, match=r"gz:1: is compressed \(gzip\); unpack the file"):
        stream(jsonl(path))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_another_encoding_than_utf_8_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt": "caf\u00e9", "answer": 1}\r\n'.encode(encoding))
    with pytest.raises(DomainError, match=r"a\.jsonl:1: not UTF-8: 'utf-8' codec"):
        stream(jsonl(path))


def test_a_byte_order_mark_and_carriage_returns_are_not_part_of_a_row(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "1", "answer": 1}\r\n\r\n'
        b'{"prompt": "\\ud83d\\ude00 2", "answer": 2}\r\n'
    )
    counts = prompt_index(jsonl(path), "math").counts
    assert (counts.rows, counts.bad) == (2, 0)


def test_only_unusable_rows_are_an_error_even_where_rows_may_be_skipped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1"}] * 3)
    message = r"no usable row in .*: .*a\.jsonl:1: no column 'prompt'; columns: 'question'"
    with pytest.raises(DomainError, match=message):
        stream(jsonl(path, on_bad_row="skip"))


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", rows(3))
    settings = ParquetPromptSettings(path=path, prompt="question", on_bad_row="skip")
    message = r"prompts: .*no column 'question'; columns: 'prompt', 'answer', 'level'"
    with pytest.raises(DomainError, match=message):
        stream(settings)
    broken = tmp_path / "b.parquet"
    broken.write_text("no parquet")
    with pytest.raises(DomainError, match=r"b\.parquet: not a Parquet file"):
        stream(ParquetPromptSettings(path=broken))


def test_a_parquet_file_whose_pages_are_damaged_is_named(tmp_path: Path) -> None:
    made = [{"prompt": "".join(map(str, range(n, n + 99))), "answer": str(n)} for n in range(999)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(made), path, row_group_size=100)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + bytes(1 << 16) + whole[1000 + (1 << 16) :])
    with pytest.raises(DomainError, match=r"domains\.math\.prompts: .*a\.parquet: "):
        stream(ParquetPromptSettings(path=path, answer="answer"))


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows(20))
    drawing = stream(jsonl(path))
    write_jsonl(path, rows(20, seed=1))
    with pytest.raises(DomainError, match=r"prompts\.path: .*a\.jsonl changed since it was index"):
        drawing.take(15)


def test_a_prompt_that_the_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "caf\u00e9"}])
    settings = JsonlPromptSettings(path=path, held_out_fraction=1e-9)
    named = r"'\u00e9' of .* is not in the voc.*; in .*a\.jsonl:2"
    for read in (lambda: stream(settings).take(2), lambda: length_report(settings, TOKENIZER, "a")):
        with pytest.raises(TokenizerError, match=named):
            read()
    skipped = settings.model_copy(update={"on_bad_row": "skip"})
    assert length_report(skipped, TOKENIZER, "a").prompts == 1


def test_no_file_and_an_empty_split_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=r"domains\.math\.prompts\.path: no jsonl file at"):
        stream(jsonl(tmp_path / "*.jsonl"))
    path = write_jsonl(tmp_path / "a.jsonl", rows(4))
    with pytest.raises(DomainError, match="none of the 4 usable rows is in the held-out split"):
        stream(jsonl(path, held_out_fraction=1e-9), split="held_out")
    with pytest.raises(DomainError, match=r"only \d+ distinct held_out prompts found, 5 needed"):
        stream(jsonl(path, held_out_fraction=0.75), split="held_out").take_distinct(5)


def test_a_pattern_names_files(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", rows(2))
    (tmp_path / "deep").mkdir()
    write_jsonl(tmp_path / "deep" / "d.jsonl", rows(2))

    def names(path: Path) -> list[str]:
        return [each.name for each in jsonl(path).files()]

    assert names(tmp_path) == ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    assert names(tmp_path / "[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(tmp_path / "c.jsonl") == ["c.jsonl"]
    assert names(tmp_path / "none.jsonl") == names(tmp_path / "**x") == []


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    inside = tmp_path / "all.jsonl"  # a folder that is called as a file, as Spark does
    inside.mkdir()
    write_jsonl(inside / "part.jsonl", rows(2))
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    (inside / "around").symlink_to(tmp_path)
    assert jsonl(tmp_path).files() == [inside / "part.jsonl"]
    for name in ("pipe", "loop", "endless"):
        assert jsonl(tmp_path / f"{name}.jsonl").files() == []


def test_old_row_groups_are_dropped_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rows(40)
    path = write_parquet(tmp_path / "a.parquet", made)
    monkeypatch.setattr("stages.data.rows.KEPT_BYTES", 1000)
    reader = ParquetRows()
    for at in [3, 39, 0, 21, 39]:
        assert reader.read(path, at)["answer"] == made[at]["answer"]
        assert len(reader._groups) < 6
    assert sum(table.nbytes for table in reader._groups.values()) < 1000


def test_a_large_file_is_never_loaded_whole(tmp_path: Path) -> None:
    """50 MB of rows; the index holds 20 bytes a row, and the order they come in 16."""
    path, filler = tmp_path / "a.jsonl", "x" * 9_990
    with path.open("w") as file:
        for number in range(5_000):
            file.write(f'{{"prompt": "{number}", "note": "{filler}"}}\n')
    assert path.stat().st_size > 50e6
    settings = JsonlPromptSettings(path=path)
    tracemalloc.start()
    drawn = stream(settings).take(100)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(drawn) == 100
    assert held < 2e6
    assert most < 3e6


def test_the_report_counts_rows_and_lengths(tmp_path: Path) -> None:
    made = [{"prompt": "x" * length} for length in range(1, 101)]
    path = write_jsonl(tmp_path / "a.jsonl", made + made[:7])
    settings = JsonlPromptSettings(path=path, max_prompt_tokens=90)
    report = length_report(settings, TOKENIZER, "math")
    assert (report.rows, report.bad, report.duplicates, report.prompts) == (107, 0, 7, 100)
    assert report.too_long == 10
    assert report.tokens == {0: 1, 50: 51, 90: 91, 95: 96, 99: 100, 100: 100}
    held = stream(settings, split="held_out")
    apart = len(prompt_index(settings, "math").split(True, 0.25))
    assert report.held_out + report.for_gates == apart
    assert report.for_gates == len(prompt_index(settings, "math").split(True, 0.05))
    assert is_held_out(held.take(1)[0], 0.25)


def test_the_report_of_an_endless_source(tmp_path: Path) -> None:
    narrow = ReasoningGymPromptSettings(
        dataset="chain_sum",
        config={"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1},
    )
    report = length_report(narrow, TOKENIZER, "math", sample_size=200)
    assert (report.rows, report.prompts, report.duplicates) == (200, 10, 190)
    assert report.tokens[100] == len("c0=")


# What reads the same is the same prompt


@pytest.mark.parametrize("other", ["2+2? ", " 2+2?\n", "2+2?\u00a0"])
def test_prompts_that_differ_in_whitespace_have_the_same_split(other: str) -> None:
    one, same = Problem("math", 0, "2+2?", "4"), Problem("math", 1, other, "4")
    assert one.key == same.key
    chat = ({"role": "system", "content": "add"}, {"role": "user", "content": "2+2?"})
    spaced = (chat[0], {"role": "user", "content": other})
    first, second = (Problem("math", 0, "", "4", {}, messages) for messages in (chat, spaced))
    assert first.key == second.key != one.key
    assert Problem("math", 0, "2 +2?", "4").key != one.key


def test_repeated_prompts_with_other_spaces_are_dropped(tmp_path: Path) -> None:
    made = [{"prompt": f"{n}+1?{' ' * (n % 2)}", "answer": "0"} for n in (1, 1, 2, 3)]
    made.append({"prompt": " 2+1? ", "answer": "0"})
    report = length_report(jsonl(write_jsonl(tmp_path / "a.jsonl", made)), TOKENIZER, "math", 9)
    assert (report.prompts, report.duplicates) == (3, 2)


def test_the_split_of_prompts_without_whitespace_is_unchanged() -> None:
    # SHA-256 of the bare text, as before whitespace was normalised: no prompt of the quickstart's
    # domains has any, so that their held-out problems stay the same.
    for prompt in ("c4-1-7+7=", "rcrunk=", "a9,83,25="):
        assert Problem("math", 0, prompt, "").key == sha256(prompt.encode()).hexdigest()
