"""`braid init` and `braid domain check` of rows as public data sets have them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from pipeline.config.validate import load
from tests.pipeline.conftest import Braid
from tests.pipeline.hugging_face_directories import TINY, published
from tests.pipeline.test_init import given, refused, said
from tests.runs import REPOSITORY

VERL = {"data_source": "math", "ability": "MATH", "extra_info": {"index": 1}}
CALL = {"name": "add", "arguments": {"a": 1}}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def two_files(directory: Path) -> list[str]:
    """Return the options of DAPO-Math's rows and of tool calls whose columns have other names."""
    weights = published(directory / "model", TINY)
    math, calls = directory / "dapo.jsonl", directory / "calls.jsonl"
    asked = (
        {
            **VERL,
            "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
        }
        for n in range(60)
    )
    math.write_text("".join(json.dumps(row) + "\n" for row in asked))
    called = (
        {
            "messages": [{"role": "user", "content": f"add {n}"}],
            "functions": json.dumps([TOOL]),
            "answers": json.dumps([CALL]),
        }
        for n in range(60)
    )
    calls.write_text("".join(json.dumps(row) + "\n" for row in called))
    # A template that shows tools, as the rows' chat messages need.
    template = "{{ tools }}{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    file = weights / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    domains = [f"math={math}", f"tool_calls={calls}"]
    return ["--model", str(weights), "--domains", *domains, "--output", f"{directory}/mine.yaml"]


def test_two_files_with_different_columns_are_taken_by_one_call(
    braid: Braid, tmp_path: Path
) -> None:
    options = two_files(tmp_path)
    code, _, err = braid("init", *options)
    assert code == 1
    assert "columns: 'data_source', 'ability', 'extra_info.index', 'prompt', 'reward_model." in err
    pasted = "--columns math.answer=reward_model.ground_truth (braid init), or domains.math."
    assert pasted in err and "--columns tool_calls.prompt=messages (braid init), or " in err
    columns = ["math.answer=reward_model.ground_truth", "tool_calls.prompt=messages"]
    more = ["tool_calls.tools=functions", "tool_calls.calls=answers"]
    said(braid, *options, "--columns", *columns, "--columns", *more)
    math, calls = (domain.model_dump() for domain in load(tmp_path / "mine.yaml").domains.values())
    assert math["prompts"]["answer"] == "reward_model.ground_truth"
    prompts = calls["prompts"]
    assert (prompts["prompt"], prompts["tools"], prompts["answer"]) == (
        *("messages", "functions"),
        None,
    )
    fields = {name: reward["calls_field"] for name, reward in calls["rewards"].items()}
    assert fields == {"right": "answers", "valid": None}


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_domain_check_gives_the_columns_to_paste(source: str, braid: Braid, tmp_path: Path) -> None:
    row = {"question": "What is 3 + 4?", "extra_info": {"answer": "7", "split": "train"}}
    numbered = [{**row, "question": f"What is 3 + 4? ({n})"} for n in range(20)]
    path = tmp_path / f"rows.{source}"
    if source == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in numbered))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(numbered), path)
    domain = tmp_path / "math.yaml"

    def check(columns: str) -> tuple[int, str, str]:
        base = REPOSITORY / "configs/domains/math.yaml"
        block = f"{{source: {source}, path: {path}, held_out_fraction: 0.25, {columns}}}"
        domain.write_text(f"extends: {base}\nprompts: {block}\n")
        return braid("domain", "check", domain, "--tokenizer", tmp_path / "model")

    published(tmp_path / "model", TINY)
    code, _, err = check("answer: answer")
    assert code == 1
    assert "columns: 'question', 'extra_info.answer', 'extra_info.split'; " in err
    fix = "{prompt: question, answer: extra_info.answer}"
    options = "--columns math.prompt=question math.answer=extra_info.answer"
    assert f"name the columns: {options} (braid init), or domains.math.prompts: {fix}" in err
    code, out, err = check(fix[1:-1])
    assert code == 0, err
    assert "; answer '7'" in out


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            "mth.prompt=question",
            '--columns mth.prompt=question: no domain mth; did you mean "math"?',
        ),
        ("math.calls=x", "--columns math.calls=x: domain math reads no column of calls"),
        ("schema=x", "--columns schema=x: no domain reads a column of schema"),
    ],
)
def test_columns_of_nothing(column: str, message: str, braid: Braid, tmp_path: Path) -> None:
    refused(braid, tmp_path, [*given(tmp_path, "tiny", ("math",)), "--columns", column], message)
