"""Published tokenizers and chat templates: text survives, and conversations are learned whole.

`make install` downloads them (tools/vendor.py). Expected targets are written by hand from the
models' published templates.
"""

# ruff: noqa: RUF001 - DeepSeek spells its special tokens with a fullwidth bar.
from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from parallel.sample import Sample
from stages.data.conversations import conversation_samples
from stages.data.tokenizer import HuggingFaceTokenizer, TokenizerError

DIRECTORY = Path(__file__).parents[1] / "vendor" / "tokenizers"
NAMES = ("qwen3", "deepseek_v3", "gptoss", "llama3_1", "llama2")
TEXTS = (
    "What is  2 + 2?\n\n\tFour: 4, 44, 444, 4444.",
    " leading and trailing \n",
    "x = {'a': [1, 2]}\r\nnaïve 你好 😀",
)


@cache
def published(name: str, **arguments: Any) -> HuggingFaceTokenizer:
    """Return a model's tokenizer; fails where it was not downloaded."""
    directory = DIRECTORY / name
    if not (directory / "VERSION").exists():
        pytest.fail(
            f"{directory} is missing: `python -m tools.vendor` downloads it, and needs an npm"
            " registry (npm config get registry)"
        )
    return HuggingFaceTokenizer(directory, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_tokenizer_json_and_text_survives(name: str) -> None:
    tokenizer = published(name)
    raw = Tokenizer.from_file(str(DIRECTORY / name / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == raw.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


def learned(tokenizer: HuggingFaceTokenizer, samples: list[Sample]) -> list[tuple[str, str]]:
    """Return the prompt and the learned text of every sample."""
    return [
        (
            tokenizer.decode_prompt(sample.prompt),
            tokenizer.decode_prompt(sample.response[sample.learned]),
        )
        for sample in samples
    ]


THOUGHTS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nA\n</think>\n\n4"},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "<think>\nB\n</think>\n\n6"},
]
CALL = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}, "type": "function"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]
CALLS = [
    {"role": "user", "content": "Rain in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def test_qwen3_reads_each_turn_after_the_prompt_that_inference_shows() -> None:
    tokenizer = published("qwen3")
    asked = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert learned(tokenizer, conversation_samples(tokenizer, THOUGHTS, "math")) == [
        (asked, "<think>\nA\n</think>\n\n4<|im_end|>"),
        (
            f"{asked}4<|im_end|>\n<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\n",
            "<think>\nB\n</think>\n\n6<|im_end|>",
        ),
    ]


def test_qwen3_learns_tool_calls_after_a_prompt_with_the_tools() -> None:
    tokenizer = published("qwen3")
    samples = conversation_samples(tokenizer, CALLS, "math", tools=TOOLS)
    (first, call), (second, answer) = learned(tokenizer, samples)
    body = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert call == f"<think>\n\n</think>\n\n{body}<|im_end|>"
    assert answer == "<think>\n\n</think>\n\nIt rains.<|im_end|>"
    tools = '<tools>\n{"type": "function", "function": {"name": "weather", "parameters": {"type"'
    assert tools in first and tools in second
    assert second.endswith(
        f"assistant\n{body}<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen3_without_thoughts_begins_its_turns_after_empty_ones() -> None:
    tokenizer = published("qwen3", enable_thinking=False)
    [(prompt, target)] = learned(
        tokenizer, conversation_samples(tokenizer, [*THOUGHTS[:1], CALLS[-1]], "math")
    )
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert target == "It rains.<|im_end|>"


def test_templates_that_rewrite_nothing_give_one_sample() -> None:
    ends = {"deepseek_v3": "<｜end▁of▁sentence｜>", "llama3_1": "<|eot_id|>"}
    for name, end in ends.items():
        tokenizer = published(name)
        [(_, target)] = learned(tokenizer, conversation_samples(tokenizer, THOUGHTS, "math"))
        both = "<think>\nA\n</think>\n\n4{0}<think>\nB\n</think>\n\n6{0}"
        assert target == both.format(end)


def test_deepseek_shows_calls_whose_content_is_null_and_whose_arguments_are_text() -> None:
    tokenizer = published("deepseek_v3")
    text = tokenizer.render([*CALLS[:1], {**CALLS[1], "tool_calls": [CALL, CALL]}], False)
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```'
    end = "<｜tool▁call▁end｜>"
    assert text.endswith(
        f"<｜Assistant｜><｜tool▁calls▁begin｜>{call}{end}\n{call}{end}<｜tool▁calls▁end｜>"
        "<｜end▁of▁sentence｜>"
    )


def test_deepseek_learns_to_end_a_turn_of_one_call_which_its_template_leaves_open() -> None:
    tokenizer = published("deepseek_v3")
    (_, call), (asked, answer) = learned(tokenizer, conversation_samples(tokenizer, CALLS, "math"))
    assert call.endswith('```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜end▁of▁sentence｜>')
    # What an engine would read after the tool: the template writes no end token there.
    assert "```<｜tool▁call▁end｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>rain" in asked
    assert answer == "It rains.<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("name", "tools", "message"),
    [
        ("llama3_1", [], "it does not show the call of weather"),
        ("deepseek_v3", TOOLS, r"it does not show tools \(weather\)"),
        ("gptoss", [], r"has no chat template.* chat_template\.jinja \(gpt-oss"),
    ],
)
def test_what_a_template_does_not_show_is_an_error(
    name: str, tools: list[Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        conversation_samples(published(name), CALLS, "math", tools=tools)
