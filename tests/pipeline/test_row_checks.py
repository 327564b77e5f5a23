"""Rows, answers and chat messages that stages or rewards cannot use, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.rows import MOST_BYTES, MOST_ROW_BYTES, MOST_ROWS, row_report
from pipeline.config.validate import load
from stages.data.settings import JsonlPromptSettings
from tests.pipeline.conftest import Braid
from tests.pipeline.violations import edited, errors, from_weights

MATH = "{kind: math}"
PAIR = {"input": "1", "output": "2"}
TOOLS: dict[str, Any] = {"tools": [{"name": "a"}], "calls": []}
CASES = [
    (MATH, {"answer": 2}, {"answer": " "}, "no answer to compare with: the row's answer is empty"),
    ("{kind: code}", {"tests": [PAIR]}, {}, "the problem has no field 'tests' with its tests"),
    ("{kind: code}", {"tests": ["assert f"]}, {"tests": []}, "there are no tests"),
    ("{kind: code}", {"tests": json.dumps([PAIR])}, {"tests": "[1"}, "Expecting ',' delimiter: "),
    ("{kind: code}", {"tests": [PAIR]}, {"tests": [PAIR, 3]}, "a test must be a mapping of input"),
    ("{kind: json_schema}", {"schema": {}}, {}, "the problem has no field 'schema', and default"),
    ("{kind: json_schema}", {"schema": "{}"}, {"schema": "{"}, "Expecting property name enclosed"),
    ("{kind: json_schema}", {"schema": {}}, {"schema": "[" * 100_000}, "JSON nested too deeply"),
    ("{kind: code}", {"tests": [PAIR]}, {"tests": "[" * 100_000}, "JSON nested too deeply"),
    ("{kind: tool_call}", TOOLS, {**TOOLS, "calls": "[" * 100_000}, "JSON nested too deeply"),
    ("{kind: tool_call}", TOOLS, {**TOOLS, "tools": "[" * 100_000}, "JSON nested too deeply"),
    (
        "{kind: tool_call}",
        TOOLS,
        {**TOOLS, "tools": [{"name": "a", "parameters": "[" * 100_000}]},
        "field 'tools': parameters of 'a': JSON nested too deeply",
    ),
    (
        "{kind: instruction}",
        {"instruction_id_list": ["punctuation:no_comma"]},
        {"instruction_id_list": ["punctuation:no_coma"]},
        "unknown instruction 'punctuation:no_coma'; known are keywords:existence, ",
    ),
    (
        "{kind: instruction}",
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {"instruction_id_list": "punctuation:no_comma", "kwargs": [{}]},
        "the problem's fields instruction_id_list and kwargs must be lists of one length, not ",
    ),
    (
        "{kind: instruction}",
        {"instruction_id_list": ["length_constraints:number_sentences"],
         "kwargs": [{"num_sentences": 2}]},
        {"instruction_id_list": ["length_constraints:number_sentences"], "kwargs": [{"n": 2}]},
        "length_constraints:number_sentences does not take {'n': 2}: ",
    ),
    (
        "{kind: instruction}",
        {"instruction_id_list": ["punctuation:no_comma"]},
        {"instruction_id_list": [["punctuation:no_comma"]]},
        "unknown instruction ['punctuation:no_comma']; known are keywords:existence, ",
    ),
    (
        "{kind: instruction}",
        {"instruction_id_list": ["punctuation:no_comma"]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["none"]},
        "the arguments of punctuation:no_comma must be a mapping, not 'none'",
    ),
    (
        "{kind: instruction}",
        {"instruction_id_list": ["keywords:letter_frequency"],
         "kwargs": [{"letter": "a", "let_frequency": 1}]},
        {"instruction_id_list": ["keywords:letter_frequency"],
         "kwargs": [{"letter": 5, "let_frequency": 1}]},
        "keywords:letter_frequency: letter must be text, not 5",
    ),
]  # fmt: skip


def of_files(config: Path, start: Path, reward: str, rows: list[dict[str, Any]]) -> Path:
    """Have the smallest configuration read its sums from rows.jsonl, and start from weights."""
    asked = ({"prompt": f"{number}+1", **row} for number, row in enumerate(rows))
    config.with_name("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    answer = ", answer: answer" if "answer" in rows[0] else ""
    prompts = f"prompts: {{source: jsonl, path: rows.jsonl{answer}}}"
    edited(config, "prompts: {dataset: chain_sum}", f"{prompts}\n    rewards: {{sum: {reward}}}")
    return from_weights(config, start)


@pytest.mark.parametrize(("reward", "good", "bad", "message"), CASES)
def test_an_answer_that_a_reward_cannot_read_is_found_by_validate(
    config: Path, start: Path, reward: str, good: Any, bad: Any, message: str
) -> None:
    of_files(config, start, reward, [good, bad, good])
    [error] = errors(config)
    where = f"domains.sums.prompts: rows.jsonl:2: reward sum: {message}"
    assert where in error
    assert error.endswith("; fix the rows, or remove them")
    rows = config.with_name("rows.jsonl")
    rows.write_text(rows.read_text().splitlines()[0])
    load(config)


def test_all_bad_rows_are_counted_and_three_are_shown(config: Path, start: Path) -> None:
    of_files(config, start, MATH, [{"answer": each} for each in (1, "", None, "", 2, "", "")])
    [error] = errors(config, "domains.sums.prompts.on_bad_row=skip")
    blank = (
        "reward sum: no answer to compare with: the row's answer is empty (prompts.answer names "
        "its column)"
    )
    assert error.endswith(
        f"domains.sums.prompts: 4 of the first 7 rows: rows.jsonl:2: {blank}; rows.jsonl:4: {blank}"
        f"; rows.jsonl:6: {blank}; and 1 more; fix the rows, or remove them"
    )
    rows = config.with_name("rows.jsonl")
    rows.write_text('{"prompt": "a"}\n' * 2 + '{"answer": 1}\n{"prompt": "b", "answer": 1}\nx\n')
    [error] = errors(config)
    absent = "no column 'answer'; columns: 'prompt'"
    assert error.endswith(
        f"domains.sums.prompts: 4 of the first 5 rows: rows.jsonl:1: {absent}; rows.jsonl:2: "
        f"{absent}; rows.jsonl:3: no column 'prompt'; columns: 'answer'; and 1 more; fix them, or "
        "skip such rows with domains.sums.prompts.on_bad_row: skip"
    )


def test_rows_of_all_files_are_checked_up_to_a_number(tmp_path: Path) -> None:
    row = '{"prompt": "a"}\n'
    (tmp_path / "a.jsonl").write_text(row * (MOST_ROWS - 1))
    (tmp_path / "b.jsonl").write_text("\n" + row + "[]\n")
    source = JsonlPromptSettings(path=tmp_path)
    assert row_report(source).checked == MOST_ROWS
    assert row_report(source).unusable == []
    [bad] = row_report(source, most=MOST_ROWS + 1).unusable
    assert bad == f"{tmp_path}/b.jsonl:3: a JSON array; write one object a line"


def test_rows_are_checked_up_to_a_number_of_bytes(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "a" * (MOST_BYTES // 5)}) + "\n"
    (tmp_path / "a.jsonl").write_text(row * 7)
    assert row_report(JsonlPromptSettings(path=tmp_path)).checked == 5


def test_a_row_that_is_cut_off_is_an_error_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt":\n')
    [bad] = row_report(JsonlPromptSettings(path=tmp_path)).unusable
    assert bad == f"{tmp_path}/a.jsonl:1: not valid JSON: Expecting value at column 11"


def test_a_row_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    row = '{"prompt": "a"}\n'
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines([row, "[" * (MOST_ROW_BYTES + 1), "\n", row, "[" * (9 << 20)])
    report = row_report(JsonlPromptSettings(path=tmp_path))
    where = f"{tmp_path}/a.jsonl"
    assert report.checked == 4
    assert report.unusable == [
        f"{where}:2: a row of more than 4 MiB",
        f"{where}:4: a row of more than 4 MiB",
    ]


def test_rows_that_a_reward_cannot_use_are_counted_and_three_are_named(
    braid: Braid, tmp_path: Path
) -> None:
    """Only a library knows what a schema is, and `braid validate` loads none."""
    schemas = [{}, *[{"type": "objekt"}] * 6, {}]
    rows = [{"prompt": f"say {n}", "schema": each} for n, each in enumerate(schemas)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "shapes.yaml"
    path.write_text(
        "prompts: {source: jsonl, path: rows.jsonl, held_out_fraction: 0.001}\n"
        "rewards: {v: {kind: json_schema}}\noptimizer: {learning_rate: 1e-3}\nloop: {steps: 2}\n"
    )
    code, out, _ = braid("domain", "check", path)
    said = " ".join(out.split())
    assert code == 1
    assert "domains.shapes.prompts: rewards cannot use 6 of 8 rows: " in said
    for line in (2, 3, 4):
        assert (
            f"{tmp_path / 'rows.jsonl'}:{line}: reward v: not a JSON schema: 'objekt' is " in said
        )
    assert f"{tmp_path / 'rows.jsonl'}:5: " not in said
    assert "; and 3 more; fix the rows, or remove them" in said


CHAT = [{"role": "user", "content": "1+1"}]
TEMPLATE = "{{ messages }}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", TEMPLATE),
        ("tokenizer_config.json", json.dumps({"chat_template": TEMPLATE})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "a", "template": ""}]})),
        ("tokenizer_config.json", "{"),  # which the stage reports
    ],
)
def test_chat_messages_need_a_chat_template(
    config: Path, start: Path, name: str, content: str
) -> None:
    of_files(config, start, MATH, [{"answer": 1}, {"prompt": CHAT, "answer": 2}])
    tokenizer = config.with_name("tokenizer")
    tokenizer.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / file).write_text("{}")
    given = f"model.tokenizer={tokenizer}"
    assert errors(config, given) == [
        "command line: model.tokenizer: tokenizer has no chat template, which the chat messages of "
        "domains.sums.prompts need; put the model's chat_template.jinja there (gpt-oss and newer "
        "models publish it as a file of its own), name another "
        "tokenizer, or write prompts as text"
    ]
    (tokenizer / name).write_text(content)
    load(config, [given])


def test_a_question_of_reasoning_gym_needs_a_chat_template_too(config: Path, start: Path) -> None:
    from_weights(config, start)
    config.with_name("tokenizer").mkdir()
    (config.with_name("tokenizer") / "tokenizer.json").write_text("{}")
    prompts = "domains.sums.prompts={dataset: countdown, form: chat}"
    [error] = errors(config, prompts, f"model.tokenizer={config.with_name('tokenizer')}")
    assert "tokenizer has no chat template, which the chat messages of domains.sums.pr" in error


def test_the_tokenizer_of_characters_cannot_write_a_question_of_reasoning_gym(
    config: Path, start: Path
) -> None:
    from_weights(config, start)
    [error] = errors(config, "domains.sums.prompts={dataset: countdown, form: chat}")
    assert error.endswith(
        "model.tokenizer: characters has no line break, which domains.sums.prompts.form: chat "
        "writes; name the directory of the model's tokenizer"
    )
