"""Conversations: what of them is learned, in which order they come, and what a template may do."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from parallel.batch import RankPlace, collate
from parallel.sample import Sample
from stages.data.conversations import (
    conversation_sample,
    conversation_samples,
    response_sample,
    segments,
)
from stages.data.demonstrations import ConversationStream, conversation_index
from stages.data.problem import DomainError, Message
from stages.data.prompts import held_out_problems
from stages.data.row_forms import conversation_of
from stages.data.settings import (
    JsonlDemonstrationSettings,
    JsonlPromptSettings,
    ParquetDemonstrationSettings,
)
from stages.data.tokenizer import (
    CharacterTokenizer,
    HuggingFaceTokenizer,
    TokenizerError,
    tokenizer_named,
)
from tests.byte_tokenizer import CHATML, GLM, save_glm, save_tokenizer

# As those that strip the reasoning of earlier turns.
FORGETFUL = CHATML.replace(
    "message.content", "(message.content if loop.last else message.content.split('/')[-1])"
)
ENDLESS = CHATML.replace("<|im_end|>", "<|other|>")
CHARACTERS = CharacterTokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of a few hundred ids, as a folder."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


def chat(*contents: str) -> list[Message]:
    """Return messages of the user and the assistant in turn."""
    return [
        {"role": ("user", "assistant")[place % 2], "content": content}
        for place, content in enumerate(contents)
    ]


def learned(tokenizer: Any, sample: Sample) -> str:
    """Return the text of the learned tokens, end tokens by name."""
    backend = tokenizer._tokenizer
    return backend.decode(sample.response[sample.learned], skip_special_tokens=False)


def test_every_assistant_turn_is_learned_up_to_its_end_token(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    messages = [{"role": "system", "content": "add"}, *chat("1+1", "it is 2", "2+2", "\n\nfour")]
    sample = conversation_sample(tokenizer, messages, "math")
    assert learned(tokenizer, sample) == "it is 2<|im_end|>\n\nfour<|im_end|>"
    whole = tokenizer.render(messages, generation_prompt=False)
    ids = [*sample.prompt, *sample.response]
    assert tokenizer._decode_run([int(i) for i in ids]) == whole.removesuffix("\n")
    asked = tokenizer.render(messages[:2], generation_prompt=True)
    assert sample.prompt.tolist() == tokenizer.encode(asked)
    # The second turn begins where a rollout's prompt would end, whatever tokens could merge there.
    again = tokenizer.encode(tokenizer.render(messages[:4], generation_prompt=True))
    first = int(sample.learned[len(tokenizer.encode("it is 2<|im_end|>"))])
    assert len(sample.prompt) + first == len(again)
    assert ids[: len(again)] == again
    assert sample.response[-1] == tokenizer.end_token


def test_a_single_turn_equals_a_rollout_s_sample(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    sample = conversation_sample(tokenizer, chat("what is 1+1", "2"), "math")
    text = "<|im_start|>user\nwhat is 1+1<|im_end|>\n<|im_start|>assistant\n"
    assert sample.prompt.tolist() == tokenizer.encode(text)
    assert sample.response.tolist() == [*tokenizer.encode("2"), tokenizer.end_token]
    assert sample.loss_mask is None
    plain = response_sample(tokenizer, text, "2", "math")
    assert plain.prompt.tolist() == sample.prompt.tolist()
    assert plain.response.tolist() == sample.response.tolist()


def test_the_character_tokenizer_learns_the_same_turns() -> None:
    sample = conversation_sample(CHARACTERS, chat("1+1", "2", "so?", "two"), "math")
    read = "".join(CHARACTERS._tokens[i] for i in [*sample.prompt, *sample.response])
    assert read == "user: 1+1 assistant: 2[END]user: so? assistant: two[END]"
    trained_on = "".join(CHARACTERS._tokens[i] for i in sample.response[sample.learned])
    assert trained_on == "2[END]two[END]"


@pytest.mark.parametrize("seed", range(5))
def test_pieces_alternate_and_make_the_whole(folder: Path, seed: int) -> None:
    random = Random(seed)
    for tokenizer in (HuggingFaceTokenizer(folder), CHARACTERS):
        contents = [
            "".join(random.choices("ab 1+", k=5)) for _ in range(2 * random.randrange(1, 6))
        ]
        [(found, _)] = segments(tokenizer, chat(*contents))
        assert len(found) == len(contents)
        whole = tokenizer.render(chat(*contents), generation_prompt=False)
        assert "".join(found) == whole
        said = zip(found[1::2], contents[1::2], strict=True)
        assert all(piece.startswith(content) for piece, content in said)


def test_turns_after_the_last_assistant_turn_are_dropped(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    long, short = (
        conversation_sample(tokenizer, chat("a", "b", *more), "math") for more in (["c"], [])
    )
    assert long.response.tolist() == short.response.tolist()


def test_a_template_that_rewrites_earlier_turns_gives_each_turn_its_own_prompt(
    tmp_path: Path,
) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, FORGETFUL))
    messages = chat("a", "hm/b", "c", "so/d", "e", "f")
    samples = conversation_samples(tokenizer, messages, "math")
    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    b, d = "b<|im_end|>\n", "d<|im_end|>\n"
    assert [tokenizer.decode_prompt(sample.prompt) for sample in samples] == [
        asked.format("a"),
        asked.format("a") + b + asked.format("c"),
        asked.format("a") + b + asked.format("c") + d + asked.format("e"),
    ]
    targets = ["hm/b<|im_end|>", "so/d<|im_end|>", "f<|im_end|>"]
    assert [learned(tokenizer, sample) for sample in samples] == targets
    assert all(sample.loss_mask is None for sample in samples)
    # Turns that a prompt has already are learned by nobody, and a response has one prompt.
    [last] = conversation_samples(tokenizer, messages, "math", context_turns=2)
    assert last.prompt.tolist() == samples[2].prompt.tolist()
    with pytest.raises(TokenizerError, match="has 2 assistant turns after different prompts"):
        conversation_sample(tokenizer, messages, "math", context_turns=1)


def test_turns_that_the_template_leaves_as_they_were_share_a_sample(tmp_path: Path) -> None:
    # Only thoughts before the last user's message are dropped, as by Qwen3's.
    kept = "(message.content if loop.index > messages|length - 3 else message.content.split('/')"
    template = CHATML.replace("message.content", kept + "[-1])")
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, template))
    samples = conversation_samples(tokenizer, chat("a", "x/b", "c", "y/d"), "math")
    assert [learned(tokenizer, sample) for sample in samples] == ["x/b<|im_end|>y/d<|im_end|>"]
    more = conversation_samples(tokenizer, chat("a", "x/b", "c", "y/d", "e", "z/f"), "math")
    targets = ["x/b<|im_end|>y/d<|im_end|>", "z/f<|im_end|>"]
    assert [learned(tokenizer, sample) for sample in more] == targets


THINKING = CHATML.replace("message.content", "(message.content.split('</think>')[-1])").replace(
    "assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif"
)


def test_thoughts_that_the_prompt_opens_and_no_turn_renders_are_learned(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, THINKING))  # as DeepSeek-R1's
    turn = {"role": "assistant", "content": "4", "reasoning_content": "Two."}
    thought = "<think>\nTwo.\n</think>\n\n4"
    for messages in (chat("2+2", thought), [*chat("2+2"), turn]):
        sample = conversation_sample(tokenizer, messages, "math")
        assert tokenizer.decode_prompt(sample.prompt).endswith("assistant\n<think>\n")
        assert learned(tokenizer, sample) == "Two.\n</think>\n\n4<|im_end|>"
    collected = "Two.\n</think>\n\n4"  # as a rollout wrote it after that prompt
    sample = conversation_sample(tokenizer, chat("2+2", collected), "math")
    assert learned(tokenizer, sample) == f"{collected}<|im_end|>"
    both = conversation_samples(tokenizer, chat("2+2", thought, "3+3", thought), "math")
    assert [learned(tokenizer, sample) for sample in both] == 2 * ["Two.\n</think>\n\n4<|im_end|>"]
    assert "4<|im_end|>\n<|im_start|>user\n3+3" in tokenizer.decode_prompt(both[1].prompt)
    with pytest.raises(TokenizerError, match=r"renders message 2 otherwise than after its gen.*5<"):
        conversation_sample(tokenizer, chat("2+2", "5"), "math")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_thoughts_that_a_template_leaves_out_are_an_error(folder: Path, key: str) -> None:
    tokenizer = HuggingFaceTokenizer(folder)
    messages = [*chat("a"), {"role": "assistant", "content": "b", key: "so it is"}]
    with pytest.raises(TokenizerError, match=f"leaves out a part of the {key} of message 2, 'so"):
        conversation_sample(tokenizer, messages, "math")


def test_a_template_without_an_end_token_is_completed_with_the_main_one(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, ENDLESS))
    sample = conversation_sample(tokenizer, chat("a", "b"), "math")
    assert learned(tokenizer, sample) == "b<|other|>\n<|im_end|>"


CALL = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
AS_TEXT = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("messages", "spans"),
    [
        (chat("hi", "hello", "bye", "see you"), "hello<|user|>see you<|user|>"),
        (
            [*chat("weather?", "so")[:1], {"role": "assistant", "content": "", "tool_calls": CALL}],
            "<tool_call>weather</tool_call><|observation|>",
        ),
        (
            [
                *chat("weather?"),
                {"role": "assistant", "content": "", "tool_calls": CALL},
                {"role": "tool", "content": "sunny"},
                {"role": "assistant", "content": "It is sunny."},
            ],
            "<tool_call>weather</tool_call><|observation|>It is sunny.<|user|>",
        ),
        (  # a call as a rollout writes it, after thoughts
            chat("weather?", f"<think>so</think>\nI look.\n{AS_TEXT}"),
            f"<think>so</think>\nI look.\n{AS_TEXT}<|observation|>",
        ),
        (  # text and thoughts that name a call are none
            chat("how?", f"Write {AS_TEXT}.", "no", f"<think>{AS_TEXT}</think>no"),
            f"Write {AS_TEXT}.<|user|><think>{AS_TEXT}</think>no<|user|>",
        ),
    ],
)
def test_glm_ends_a_turn_with_the_role_of_whoever_speaks_next(
    tmp_path: Path, messages: list[Message], spans: str
) -> None:
    """The spans are those of NeMo Automodel's training template for GLM, test_glm5_3_flash.

    It renders the released template's text, and after the last turn the next role's token. It also
    learns `<|system|>`, which GLM's generation_config.json does not list. GLM's maintainers:
    `<|user|>` ends a turn of a conversation, `<|observation|>` a call (zai-org/GLM-4, issue 398).
    """
    tokenizer = tokenizer_named(str(save_glm(tmp_path)))
    sample = conversation_sample(tokenizer, messages, "math")
    assert learned(tokenizer, sample) == spans
    whole = tokenizer.render(messages, generation_prompt=False)
    ids = [int(token) for token in (*sample.prompt, *sample.response)]
    assert tokenizer.decode_prompt(ids[:-1]) == whole
    assert ids[-1] == sample.response[sample.learned][-1]


def test_a_turn_that_no_end_token_follows_is_a_sample_with_one(tmp_path: Path) -> None:
    tokenizer = tokenizer_named(str(save_glm(tmp_path)))
    messages = [*chat("hi", "hello"), {"role": "system", "content": "so"}, *chat("ok", "done")]
    first, second = conversation_samples(tokenizer, messages, "math")
    assert [learned(tokenizer, sample) for sample in (first, second)] == [
        "hello<|user|>",
        "done<|user|>",
    ]
    # A rollout reads the conversation as the template writes it, without that end.
    asked = tokenizer.decode_prompt(second.prompt.tolist())
    assert asked == tokenizer.render(messages[:-1], generation_prompt=True)


def test_a_call_that_only_the_tools_name_is_not_shown(tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
    tokenizer = tokenizer_named(str(save_tokenizer(tmp_path, template)))
    asked = [*chat("weather?"), {"role": "assistant", "content": "", "tool_calls": CALL}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    with pytest.raises(TokenizerError, match="does not show the call of weather"):
        conversation_sample(tokenizer, asked, "math", tools=tools)


def test_the_role_after_a_turn_that_has_its_end_token_is_not_learned(tmp_path: Path) -> None:
    """A rollout stops at the first end token, so it never samples the one that follows."""
    ended = "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% for call"
    (save_glm(tmp_path) / "chat_template.jinja").write_text(GLM.replace("{% for call", ended))
    tokenizer = tokenizer_named(str(tmp_path))
    sample = conversation_sample(tokenizer, chat("hi", "hello", "bye", "see you"), "math")
    assert learned(tokenizer, sample) == "hello<|endoftext|>see you<|endoftext|>"


def test_only_learned_tokens_are_predicted_and_counted() -> None:
    samples = [
        conversation_sample(CHARACTERS, chat("1+1", "2", "so", "two"), "math"),
        response_sample(CHARACTERS, "3+3=", "6", "math"),
    ]
    whole = RankPlace()
    batch = collate(samples, whole, replay=False)
    assert batch.mask.sum() == len("2two") + 2 + len("6") + 1
    targets = batch.targets[batch.mask].tolist()
    assert "".join(CHARACTERS._tokens[i] for i in targets) == "2[END]two[END]6[END]"
    assert batch.own_targets.tolist() == targets
    # What predicts a token is the one before it, which the model reads.
    read = batch.tokens[0, batch.predicts].tolist()
    assert "".join(CHARACTERS._tokens[i] for i in read) == " 2 two=6"
    halves = [collate(samples, RankPlace(context=2, context_rank=rank), False) for rank in range(2)]
    places = np.concatenate([half.place.numpy() for half in halves])
    assert sorted(places) == sorted(batch.place.tolist())


# Streams


def write(path: Path, made: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(made), path, row_group_size=4)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def conversations(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": chat(f"say {n}", str(n), *(["again", str(n)] if n % 3 == 0 else []))}
        for n in range(count)
    ]


def stream(settings: Any, limit: int = 100, held_out: float = 0.25, **options: Any) -> Any:
    return ConversationStream(settings, CHARACTERS, "math", 7, held_out, limit, **options)


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [[*each.prompt, *each.response, *each.learned] for each in samples]


def test_a_stream_resumes_exactly_and_formats_agree(tmp_path: Path) -> None:
    made = conversations(40)
    one = JsonlDemonstrationSettings(path=write(tmp_path / "a.jsonl", made))
    other = ParquetDemonstrationSettings(path=write(tmp_path / "a.parquet", made))
    whole = stream(one, limit=50).draw(1, 90)
    assert tokens(stream(other, limit=50).draw(1, 90)) == tokens(whole)
    for taken in range(0, 90, 11):
        first = stream(one, limit=50)
        head = first.draw(1, taken)
        tail = stream(one, limit=50, cursor=first.cursor).draw(2, 90 - taken)
        assert tokens(head + tail) == tokens(whole)


def test_held_out_prompts_are_never_demonstrated(tmp_path: Path) -> None:
    made = conversations(200)
    prompts = [{"prompt": row["messages"][0]["content"]} for row in made]
    asked = JsonlPromptSettings(path=write(tmp_path / "p.jsonl", prompts))
    held = {p.prompt for p in held_out_problems(asked, CHARACTERS, "math", 35)}
    shown = stream(JsonlDemonstrationSettings(path=write(tmp_path / "a.jsonl", made))).draw(1, 300)
    texts = {CHARACTERS.decode(each.prompt) for each in shown}
    assert len(texts) > 120
    assert texts.isdisjoint(CHARACTERS.render(chat(prompt), True) for prompt in held)
    pairs = [{"prompt": row["prompt"], "response": "yes"} for row in prompts]
    settings = JsonlDemonstrationSettings(
        path=write(tmp_path / "r.jsonl", pairs), response="response"
    )
    shown = stream(settings).draw(1, 300)
    assert held.isdisjoint(CHARACTERS.decode(each.prompt) for each in shown)
    assert {CHARACTERS.decode(each.response) for each in shown} == {"yes"}


def test_long_conversations_are_skipped_and_counted(tmp_path: Path) -> None:
    settings = JsonlDemonstrationSettings(path=write(tmp_path / "a.jsonl", conversations(30)))
    drawing = stream(settings, limit=50, held_out=1e-9)
    assert max(each.length for each in drawing.draw(1, 20)) <= 50
    assert drawing.too_long in range(1, 11)
    message = r"demonstrations\.max_tokens: every conversation is longer than 9 tokens"
    with pytest.raises(DomainError, match=message):
        stream(settings, limit=9).draw(1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chat": []}, "no column 'messages'; columns: 'chat'"),
        ({"messages": chat("a")}, "'messages' has no assistant turn to train on"),
        ({"messages": chat("a", "b")[1:]}, "'messages' must not start with an assistant turn"),
        ({"messages": [{"role": "user"}]}, "'messages' has a message, number 1, whose content is"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", [*conversations(3), row, conversations(1)[0]])
    with pytest.raises(DomainError, match=rf"math\.demonstrations: .*a\.jsonl:4: {message}"):
        stream(JsonlDemonstrationSettings(path=path))
    skipping = JsonlDemonstrationSettings(path=path, on_bad_row="skip")
    counts = conversation_index(skipping, "math").counts
    assert (counts.rows, counts.bad, counts.duplicates) == (5, 1, 1)


def test_messages_replace_the_prompt_of_a_rendered_row_alone() -> None:
    row = {"messages": chat("1+1="), "prompt": "user: 1+1= assistant: ", "response": "2"}
    columns = ("messages", "prompt", "response")
    assert conversation_of(row, *columns) == (row["prompt"], "2")
    assert conversation_of(row, *columns, rendered=True) == chat("1+1=", "2")
    text = {**row, "messages": None}
    assert conversation_of(text, *columns, rendered=True) == (row["prompt"], "2")


def test_an_unusable_template_is_an_error_before_training_that_names_the_row(
    tmp_path: Path,
) -> None:
    template = CHATML.replace("message.content", "message.content.split('/')[-1]")
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / "tokenizer", template))
    made = [{"messages": chat("a", "b")}, {"messages": chat("a", "hm/b")}]
    settings = JsonlDemonstrationSettings(path=write(tmp_path / "a.jsonl", made))
    with pytest.raises(TokenizerError, match=r"leaves out a part of .*'hm/b'.*; in .*a\.jsonl:2"):
        ConversationStream(settings, tokenizer, "math", 0, 1e-9, 100)
    skipping = settings.model_copy(update={"on_bad_row": "skip"})
    usable = ConversationStream(skipping, tokenizer, "math", 0, 1e-9, 100)
    assert {learned(tokenizer, sample) for sample in usable.draw(1, 5)} == {"b<|im_end|>"}
    write(settings.path, made[1:])
    conversation_index.cache_clear()
    with pytest.raises(DomainError, match=r"demonstrations\.path: .*a\.jsonl:1: .*leaves out"):
        ConversationStream(skipping, tokenizer, "math", 0, 1e-9, 100)


def test_a_conversation_of_several_samples_is_drawn_and_counted_whole(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / "tokenizer", FORGETFUL))
    made = [{"messages": chat(f"a{n}", "hm/b", "c", "d")} for n in range(6)]
    settings = JsonlDemonstrationSettings(path=write(tmp_path / "a.jsonl", made))

    def drawing(**options: Any) -> ConversationStream:
        return ConversationStream(settings, tokenizer, "math", 0, 1e-9, 100, **options)

    whole = drawing().draw(1, 6)
    assert len(whole) == 12
    assert sum(len(sample.learned) for sample in whole) == 6 * (len("hm/b") + len("d") + 2)
    some = drawing()
    head = some.draw(1, 4)
    assert tokens(head + drawing(cursor=some.cursor).draw(2, 2)) == tokens(whole)
    assert len([*drawing().all()]) == 12


def test_two_assistant_turns_may_follow_each_other_without_text_between(tmp_path: Path) -> None:
    """A template that writes contents alone has neither an end token nor a generation prompt."""
    contents = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, contents))
    messages = [*chat("a", "b"), {"role": "assistant", "content": "c"}]
    sample = conversation_sample(tokenizer, messages, "math")
    assert tokenizer.decode_prompt(sample.response) == "bc<|im_end|>"
    assert sample.loss_mask is None
