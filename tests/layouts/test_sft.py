"""A cold start on multi-turn conversations with a custom tokenizer, up to its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from parallel.settings import LayoutSettings
from tests.byte_tokenizer import CHATML, save_tokenizer
from tests.layouts.sft_cases import train
from tests.ranks import On

ROLES = ("user", "assistant")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The directory of conversations of one or three turns, some too long, and of prompts."""
    chats = []
    for number in range(40):
        turns = [f"say {number}", str(number), *["again", "no", "do", "ok"][: number % 3 * 2]]
        turns[0] += " please" * (number % 7 == 6) * 9
        chats.append([{"role": ROLES[i % 2], "content": turn} for i, turn in enumerate(turns)])
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    lines = [json.dumps({"prompt": f"what is {number}"}) for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_conversations_train_alike_under_every_layout_and_are_exported(on: On, data: Path) -> None:
    folder, output = save_tokenizer(data / "tokenizer", CHATML), data / "exported"
    one = LayoutSettings()
    [(alone, drawn)] = on(one, train, one, str(data), str(folder), str(output))
    assert all(resumed == gone_on for resumed, gone_on in drawn)
    assert sum(step["too_long"] for step in alone) > 0
    assert alone[2]["loss"] < alone[0]["loss"]
    spread = LayoutSettings(ranks=2, context=2)
    for metrics, _ in on(spread, train, spread, str(data), str(folder), None):
        for here, there in zip(metrics, alone, strict=True):
            assert here["too_long"] == there["too_long"]
            assert here["loss"] == pytest.approx(there["loss"], abs=1e-5)
            assert here["gradient_norm"] == pytest.approx(there["gradient_norm"], rel=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.eos_token == "<|im_end|>"
    config = AutoConfig.from_pretrained(output)
    assert config.eos_token_id == tokenizer.eos_token_id == 2
    assert config.pad_token_id == tokenizer.pad_token_id == 0
