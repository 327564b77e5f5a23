"""A template of prompts in a configuration: its errors, and what `braid domain check` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.conftest import Braid
from tests.pipeline.hugging_face_directories import TINY, published
from tests.pipeline.violations import edited, errors
from tests.runs import REPOSITORY


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{user: Answer}", "template.user: {prompt}, where the row's prompt stands, must be in it"),
        ("{form: text, system: add}", "template.system: a prompt of form: text has no messages"),
        ("{usr: a}", 'template.usr: unknown key; did you mean "user"?'),
        ("{form: text}", "a.jsonl:1: its prompt is chat messages; prompts.template.form: text"),
    ],
)
def test_a_template_is_checked_before_anything_runs(
    template: str, message: str, config: Path
) -> None:
    row = {"prompt": [{"role": "user", "content": "1"}], "answer": 1}
    config.with_name("a.jsonl").write_text(json.dumps(row) + "\n")
    edited(
        config,
        "prompts: {dataset: chain_sum}",
        f"prompts: {{source: jsonl, path: a.jsonl, answer: answer, template: {template}}}\n"
        "    rewards: {sum: {kind: math}}",
    )
    [error] = [error for error in errors(config) if message in error]
    assert error.startswith("small.yaml:15: domains.sums.prompts")


def test_domain_check_shows_the_first_prompt_as_the_model_reads_it(
    braid: Braid, tmp_path: Path
) -> None:
    directory = published(tmp_path / "model", TINY)
    chat = "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(chat + "<assistant>")
    rows = [{"question": f"What is {n} + 4?", "answer": str(n + 4)} for n in range(40)]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domain = tmp_path / "math.yaml"
    base = REPOSITORY / "configs/domains/math.yaml"
    keys = f"{{path: {path}, prompt: question, held_out_fraction: 0.25"
    domain.write_text(f"extends: {base}\nprompts: {keys}}}\n")
    code, out, err = braid("domain", "check", domain, "--tokenizer", directory)
    assert code == 0, err
    note = r'ask for it: domains.math.prompts.template: {user: "{prompt}\nPut the final answer in'
    assert note in out and "\n  | What is " in out
    user = r'"{prompt}\nPut the final answer in \\boxed{}."'
    domain.write_text(
        f"extends: {base}\nprompts: {keys}, template: {{system: Think., user: {user}}}}}\n"
    )
    code, out, err = braid("domain", "check", domain, "--tokenizer", directory)
    assert code == 0, err
    assert "ask for it" not in out
    shown = out.partition("the first prompt as the model reads it:\n")[2].splitlines()
    assert shown[0] == "  | <system>Think."
    assert shown[1].startswith("  | <user>What is ")
    assert shown[2] == r"  | Put the final answer in \boxed{}."
    assert shown[3] == "  | <assistant>"
