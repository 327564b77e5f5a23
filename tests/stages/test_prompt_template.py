"""A domain's template of prompts: what the model reads, its split, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.validate import load
from stages.data.columns import RowError
from stages.data.conversations import conversation_samples
from stages.data.demonstrations import ConversationStream, conversation_index
from stages.data.prompt_template import templated, templated_conversation
from stages.data.prompts import PromptStream, prompt_index
from stages.data.settings import (
    JsonlDemonstrationSettings,
    JsonlPromptSettings,
    PromptTemplateSettings,
)
from stages.data.tokenizer import CharacterTokenizer
from stages.kinds.mixture_stage import demonstrated
from tests.runs import REPOSITORY

TOKENIZER = CharacterTokenizer()
TEMPLATE = PromptTemplateSettings(system="add", user="{prompt} be brief.")
ASKED = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1= be brief."}]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "prompt",
    ["1+1=", "1+1= be brief.", [{"role": "user", "content": "1+1="}], ASKED[1:], ASKED],
)
def test_what_a_row_has_already_is_not_added_again(prompt: Any) -> None:
    assert templated(prompt, TEMPLATE) == ASKED


def test_the_last_message_of_the_user_is_wrapped() -> None:
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "tool")]
    contents = [turn["content"] for turn in templated(turns, TEMPLATE)]  # type: ignore[index]
    assert contents == ["add", "a", "a", "a be brief.", "a"]


def test_text_of_a_base_model_stays_text() -> None:
    template = PromptTemplateSettings(form="text", user="Q: {prompt} A:")
    assert templated("1+1=", template) == "Q: 1+1= A:"
    assert templated_conversation(("1+1=", "2"), template) == ("Q: 1+1= A:", "2")


@pytest.mark.parametrize(
    ("prompt", "template", "message"),
    [
        ([{"role": "system", "content": "no"}, *ASKED[1:]], TEMPLATE, "another message of the sys"),
        ([{"role": "tool", "content": "3"}], TEMPLATE, "no message of the user"),
        (ASKED, PromptTemplateSettings(form="text"), "form: text needs text"),
    ],
)
def test_a_prompt_that_does_not_fit(
    prompt: Any, template: PromptTemplateSettings, message: str
) -> None:
    with pytest.raises(RowError, match=message):
        templated(prompt, template)


def test_a_rollout_and_a_demonstration_read_the_same_prompt_on_one_side_of_the_split(
    tmp_path: Path,
) -> None:
    questions = [f"{n}+1=" for n in range(40)]
    path = lines(tmp_path / "a.jsonl", [{"prompt": q, "answer": "1"} for q in questions])
    prompts = JsonlPromptSettings(path=path, template=TEMPLATE, held_out_fraction=0.5)
    problem = PromptStream(prompts, TOKENIZER, "sums", 0, "rl").take(1)[0]
    assert problem.prompt == f"system: add user: {problem.messages[1]['content']} assistant: "  # type: ignore[index]
    index = prompt_index(prompts, "sums")
    trained = set(index.keys[index.split(False, 0.5)].tolist())
    assert 0 < len(trained) < len(questions)
    forms: dict[str, Any] = {
        "response": [{"prompt": q, "response": "2"} for q in questions],
        "messages": [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "2"}]}
            for q in questions
        ],
    }
    for form, rows in forms.items():
        source = JsonlDemonstrationSettings(
            path=lines(tmp_path / f"{form}.jsonl", rows),
            response="response" if form == "response" else None,
        )
        shown = conversation_index(source, "sums", template=TEMPLATE)
        assert set(shown.keys[shown.split(False, 0.5)].tolist()) == trained
        stream = ConversationStream(source, TOKENIZER, "sums", 0, 0.5, 200, template=TEMPLATE)
        [sample] = stream.draw(0, 1)
        text = TOKENIZER.decode_prompt(sample.prompt)
        assert text.startswith("system: add user: ") and text.endswith(" be brief. assistant: ")
        assert stream.rows == len(trained)


def test_a_cold_start_reads_the_template(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"prompt": "1+1=", "response": "2"}])
    small = load(REPOSITORY / "configs" / "quickstart.yaml")
    domain = small.domains["chain_sum"].model_copy(
        update={
            "prompts": JsonlPromptSettings(path=path, template=TEMPLATE, held_out_fraction=1e-9),
            "demonstrations": JsonlDemonstrationSettings(path=path, response="response"),
        }
    )
    settings = small.model_copy(update={"domains": {"sums": domain}})
    job = SimpleNamespace(settings=settings, seeded_as="cold_start")
    [sample] = demonstrated(job, "sums", TOKENIZER).draw(0, 1)  # type: ignore[arg-type]
    conversation = [*ASKED, {"role": "assistant", "content": "2"}]
    [expected] = conversation_samples(TOKENIZER, conversation, "sums")
    assert sample.prompt.tolist() == expected.prompt.tolist()
    assert TOKENIZER.decode_prompt(sample.prompt) == "system: add user: 1+1= be brief. assistant: "
