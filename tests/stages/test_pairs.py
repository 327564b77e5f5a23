"""Preference pairs: what of a row is learned, which rows come, and in which order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from pydantic import TypeAdapter

from parallel import batch
from parallel.sample import Sample
from stages.data.collected import write_part
from stages.data.conversations import conversation_sample
from stages.data.index import PROBED
from stages.data.problem import DataError, content_key
from stages.data.tokenizer import CharacterTokenizer
from stages.kinds.dpo.pairs import CollectedPairs, FilePairs, PairStream
from stages.kinds.dpo.settings import PairSource

CHARACTERS = CharacterTokenizer()
COLUMNS = ("prompt", "chosen", "rejected")
KEY = "stages.tuned.data.own"
Row = dict[str, Any]


def files(path: Path, rows: list[Row], fraction: float = 1e-9, **settings: Any) -> FilePairs:
    path.write_text("\n".join(map(json.dumps, rows)))
    given = {"source": "jsonl", "path": str(path), **settings}
    source: Any = TypeAdapter(PairSource).validate_python(given)
    return FilePairs(source, COLUMNS, KEY, fraction)


def stream(rows: Any, limit: int = 99, seed: int = 0) -> PairStream:
    return PairStream("own", rows, CHARACTERS, seed, limit, KEY)


def texts(pair: Any) -> tuple[str, str, str]:
    """Return the prompt, and the learned text of both responses."""
    for each in pair:
        assert each.prompt.tolist() == pair[0].prompt.tolist()
    chosen, rejected = (shown(each.response[each.learned]) for each in pair)
    return CHARACTERS.decode(pair[0].prompt), chosen, rejected


def shown(ids: np.ndarray) -> str:
    """Return the text, with an end token as an exclamation mark."""
    parts = np.split(ids, np.flatnonzero(ids == CHARACTERS.end_token) + 1)
    return "".join(CHARACTERS.decode(part) + "!" * (CHARACTERS.end_token in part) for part in parts)


def test_texts_and_chat_messages_are_learned_after_the_prompt_alone(tmp_path: Path) -> None:
    user, said = ({"role": role, "content": "hi"} for role in ("user", "assistant"))
    more = [said, {"role": "user", "content": "so"}, {"role": "assistant", "content": "ok"}]
    rows = files(
        tmp_path / "p.jsonl",
        [
            {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
            {"prompt": [user], "chosen": "yes", "rejected": [{**said, "content": "no"}]},
            {"prompt": [user, said, user], "chosen": more, "rejected": "no"},
        ],
    )
    found = [texts(rows.samples(row, CHARACTERS, "own")) for row in range(3)]
    assert found[0] == ("1+1=", "2!", "33!")
    assert found[1] == ("user: hi assistant: ", "yes!", "no!")
    # The prompt's own assistant turn is not learned; a prompt decodes up to its end token.
    assert found[2] == ("user: hi assistant: hi", "hi!ok!", "no!")
    chosen, _ = rows.samples(2, CHARACTERS, "own")
    whole = conversation_sample(CHARACTERS, [user, said, user, *more], "own")
    assert [*chosen.prompt, *chosen.response] == [*whole.prompt, *whole.response]
    assert len(chosen.learned) == len(whole.learned) - len("hi!")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": " b "}, "'chosen' and 'rejected' are equal"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "b"}, "'chosen' must be text, as the prompt"),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "chosen": [{"role": "user", "content": "a"}],
                "rejected": "b",
            },
            "'chosen' must start and end with an assistant turn, without the prompt",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "chosen": [
                    {"role": "assistant", "content": "a"},
                    {"role": "user", "content": "b"},
                ],
                "rejected": "b",
            },
            "'chosen' must start and end with an assistant turn, without the prompt",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "chosen": [{"role": "assistant", "content": "b", "weight": 0}],
                "rejected": "c",
            },
            "'chosen' has no assistant turn to train on",
        ),
    ],
)
def test_an_unusable_row_is_an_error_or_counted(tmp_path: Path, row: Row, message: str) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError) as error:
        files(tmp_path / "p.jsonl", [good, row])
    assert f"{KEY}: {tmp_path / 'p.jsonl'}:2: {message}" in str(error.value)
    assert len(files(tmp_path / "q.jsonl", [good, row], on_bad_row="skip")) == 1


def test_held_out_prompts_never_come(tmp_path: Path) -> None:
    prompts = [f"say {number}" for number in range(200)]
    held = {each for each in prompts if int(content_key(each)[:16], 16) < 2**62}
    rows: list[Row] = [{"prompt": each, "chosen": "a", "rejected": "b"} for each in prompts]
    for each in prompts:  # also where a held-out prompt is only the first turn
        turns = [{"role": "user", "content": each}, {"role": "assistant", "content": "a"}]
        asked = [*turns, {"role": "user", "content": "more"}]
        rows.append({"prompt": asked, "chosen": "b", "rejected": "c"})
    found = files(tmp_path / "p.jsonl", rows, fraction=0.25)
    shown = [texts(found.samples(row, CHARACTERS, "own"))[0] for row in range(len(found))]
    asked_for = {text.removeprefix("user: ").removesuffix(" assistant: a") for text in shown}
    assert 20 < len(held) < 80
    assert not asked_for & held
    assert asked_for == set(prompts) - held
    with pytest.raises(DataError, match=r"change domains\.\*\.prompts\.held_out_fraction"):
        files(
            tmp_path / "h.jsonl",
            [row for row in rows[:200] if row["prompt"] in held],
            fraction=0.25,
        )


def test_a_prompt_that_is_held_out_with_its_assistant_turns_never_comes(tmp_path: Path) -> None:
    """Another run may hold out the whole of it, as a prompt of several turns."""
    asked = [
        [
            {"role": "user", "content": f"say {number}"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "more"},
        ]
        for number in range(100)
    ]
    rows: list[Row] = [{"prompt": each, "chosen": "b", "rejected": "c"} for each in asked]
    found = files(tmp_path / "p.jsonl", rows, fraction=0.25)
    held = [
        {int(content_key(turns)[:16], 16) < 2**62 for turns in (each, each[:1])} for each in asked
    ]
    assert len(found) == sum(True not in each for each in held)
    first = [int(content_key(each[:1])[:16], 16) < 2**62 for each in asked]
    assert len(found) < first.count(False)


def test_two_pairs_of_one_prompt_are_kept_and_equal_ones_once(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [pair, {**pair, "chosen": "d"}, {**pair, "rejected": "d"}, pair]
    assert len(files(tmp_path / "p.jsonl", rows)) == 3


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_the_only_pair_that_fits_comes_again_and_again(tmp_path: Path, side: str) -> None:
    """Whatever its places in two epochs; the longer response decides."""
    pair = {"prompt": "1", "chosen": "a", "rejected": "b"}
    rows = [pair, *({**pair, side: "c" * n} for n in range(20, 30))]
    one = stream(files(tmp_path / "p.jsonl", rows), limit=9)
    assert {one.next().row for _ in range(30)} == {0}


def test_a_stream_has_each_pair_once_an_epoch_and_skips_long_ones(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "chosen": "a" * n, "rejected": "b"} for n in range(1, 13)]
    pairs = files(tmp_path / "p.jsonl", rows)
    one = stream(pairs, limit=9)
    drawn = [one.next() for _ in range(16)]
    lengths = [each.chosen.length for each in drawn]
    assert sorted(lengths[:8]) == sorted(lengths[8:]) == [*range(2, 10)]
    assert lengths[:8] != lengths[8:]
    assert one.too_long == one.cursor - 16 > 0
    again = stream(pairs, limit=9)
    again.cursor = one.cursor
    assert again.next().row == one.next().row
    assert {each.row for each in one.all()} == {each.row for each in drawn}
    assert stream(pairs, limit=9, seed=1).digest == one.digest
    assert stream(pairs, limit=8).digest != one.digest
    for draw in (stream(pairs, limit=1).next, lambda: list(stream(pairs, limit=1).all())):
        with pytest.raises(DataError, match=rf"{KEY}\.max_tokens: every pair has a sequence of m"):
            draw()


def test_pairs_are_tokenised_when_they_are_drawn(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(500)]
    pairs = files(tmp_path / "p.jsonl", rows)
    read = mock.Mock(wraps=pairs)
    read.__len__ = lambda _: len(pairs)
    one = stream(read)
    assert read.samples.call_count == PROBED
    one.next()
    assert read.samples.call_count == PROBED + 1
    changed = files(tmp_path / "q.jsonl", [*rows[:-1], {**rows[-1], "chosen": "c"}])
    assert stream(changed).digest != one.digest == stream(pairs).digest


def collected(path: Path, rows: list[tuple[str, str, float | None, bool]]) -> Path:
    """Write responses as a stage of kind sample does; False is a truncated one."""
    write_part(
        path,
        [
            {
                "domain": "sums",
                "problem": content_key(prompt),
                "index": 0,
                "prompt": prompt,
                "messages": None,
                "response": response,
                "tokens": len(response) + ended,
                "token_ids": [*CHARACTERS.encode(response), *[1] * ended],
                "reward": reward,
                "reward_parts": [],
                "finish_reason": "stop" if ended else "length",
                "model": "x",
                "weight_version": 0,
                "stage": "collect",
                "seed": 0,
                "dropped": None,
            }
            for prompt, response, reward, ended in rows
        ],
    )
    return path


def test_each_prompt_s_best_and_worst_response_are_a_pair(tmp_path: Path) -> None:
    rows: list[tuple[str, str, float | None, bool]] = [
        ("1+1=", "3", 0.0, True),
        ("2+2=", "4", 1.0, True),
        ("1+1=", "2", 1.0, True),
        ("1+1=", "5", 0.0, True),
        ("2+2=", "4", 1.0, True),
        ("3+3=", "7777", -0.5, False),
        ("3+3=", "6", 0.5, True),
        ("3+3=", "8", None, True),
        ("1+1=", "02", 1.0, True),
    ]
    found = CollectedPairs(collected(tmp_path / "c.parquet", rows), KEY, 1e-9)
    pairs = [texts(found.samples(row, CHARACTERS, "own")) for row in range(len(found))]
    assert pairs == [("1+1=", "2!", "3!"), ("3+3=", "6!", "7777")]
    assert found.place(0) == f"{tmp_path / 'c.parquet'}, row 3 and {tmp_path / 'c.parquet'}, row 1"
    with pytest.raises(DataError, match=r"none of its 1 prompts has responses of different"):
        CollectedPairs(collected(tmp_path / "d.parquet", rows[1:2]), KEY, 1e-9)
    with pytest.raises(DataError, match=r"none of its 0 prompts"):
        CollectedPairs(tmp_path / "c.parquet", KEY, 1 - 1e-9)


def test_responses_of_two_domains_to_one_prompt_are_not_compared(tmp_path: Path) -> None:
    """Each domain has its own rewards."""
    rows = [("1+1=", "2", 1.0, True), ("1+1=", "3", 0.5, True), ("1+1=", "4", 9.0, True)]
    path = collected(tmp_path / "c.parquet", rows)  # type: ignore[arg-type]
    table = parquet.read_table(path)
    domains = pyarrow.array(["sums", "sums", "other"])
    parquet.write_table(table.set_column(0, "domain", domains), path)
    [pair] = [CollectedPairs(path, KEY, 1e-9).samples(0, CHARACTERS, "own")]
    assert texts(pair) == ("1+1=", "2!", "3!")


def test_the_digest_of_pairs_tells_apart_which_rows_they_are_in(tmp_path: Path) -> None:
    """The reference's log-probabilities are kept by row, also of rows that are too long."""
    first, second, long = (
        {"prompt": f"{n}", "chosen": "a" * n, "rejected": "b"} for n in (1, 2, 30)
    )
    found = {
        stream(files(tmp_path / f"{n}.jsonl", rows), limit=9).digest
        for n, rows in enumerate([[first, second, long], [long, first, second]])
    }
    assert len(found) == 2


def test_the_digest_of_files_tells_apart_which_columns_are_read(tmp_path: Path) -> None:
    """Beyond the first PROBED pairs nothing else does."""
    pairs = files(tmp_path / "p.jsonl", [{"prompt": "1", "chosen": "a", "rejected": "b", "c": "b"}])
    source: Any = TypeAdapter(PairSource).validate_python(
        {"source": "jsonl", "path": str(tmp_path / "p.jsonl")}
    )
    other = FilePairs(source, ("prompt", "chosen", "c"), KEY, 1e-9)
    assert pairs.digest() != other.digest()


def test_the_digest_of_pairs_tells_apart_how_responses_are_tokenised(tmp_path: Path) -> None:
    class Other(CharacterTokenizer):
        """A tokenizer that ends responses by another token."""

        def __init__(self) -> None:
            super().__init__()
            self.end_tokens = (CHARACTERS.pad_token,)

    pairs = files(tmp_path / "p.jsonl", [{"prompt": "1", "chosen": "a", "rejected": "b"}])
    other = PairStream("own", pairs, Other(), 0, 99, KEY)
    assert other.digest != stream(pairs).digest


def test_the_digest_of_collected_pairs_tells_apart_their_contents(tmp_path: Path) -> None:
    """Beyond the first PROBED pairs nothing else does."""
    digests = set()
    for number, worse in enumerate("34"):
        path = tmp_path / f"{number}.parquet"
        rows = [("1+1=", "2", 1.0, True), ("1+1=", worse, 0.0, True)]
        digests.add(CollectedPairs(collected(path, [*rows]), KEY, 1e-9).digest())
    assert len(digests) == 2


def test_collected_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    rows = [("1+1=", "2", 1.0, True), ("1+1=", "3", 0.0, True)]
    path = collected(tmp_path / "c.parquet", rows)  # type: ignore[arg-type]
    table = parquet.read_table(path)
    ids = pyarrow.array([[9, 1], [8, 1]], table.schema.field("token_ids").type)
    parquet.write_table(
        table.set_column(table.schema.get_field_index("token_ids"), "token_ids", ids), path
    )
    with pytest.raises(DataError, match=r"row 1: its tokens are not of model\.tokenizer"):
        CollectedPairs(path, KEY, 1e-9).samples(0, CHARACTERS, "own")


def test_a_collected_prompt_that_the_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    path = collected(
        tmp_path / "c.parquet", [("caf\u00e9", "2", 1.0, True), ("caf\u00e9", "3", 0.0, True)]
    )
    with pytest.raises(
        DataError, match=rf"^{KEY}\.stage: {path}, row 1: .*'\u00e9' of .*is not in"
    ):
        CollectedPairs(path, KEY, 1e-9).samples(0, CHARACTERS, "own")


@pytest.mark.parametrize("hands", [1, 2, 3])
def test_the_two_samples_of_a_pair_stay_together(hands: int) -> None:
    random = np.random.default_rng(0)
    samples = [
        Sample("own", np.zeros(1, np.int32), np.zeros(n, np.int32), group=place // 2)
        for place, n in enumerate(random.integers(1, 40, 22))
    ]
    dealt = batch.deal(samples, hands, together=2)
    assert sorted(each.group for hand in dealt for each in hand) == sorted(2 * [*range(11)])
    places = {id(sample): place for place, sample in enumerate(samples)}
    for hand in dealt:
        for first, second in zip(hand[::2], hand[1::2], strict=True):
            assert places[id(first)] % 2 == 0
            assert places[id(first)] + 1 == places[id(second)]
    tokens = [sum(each.length for each in hand) for hand in dealt]
    assert max(tokens) - min(tokens) < 80
