"""Files of prompts and demonstrations, and tokenizers, as a configuration names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.validate import load
from tests.pipeline.test_config import edited, faults


def test_files_stand_beside_the_file_that_states_them(config: Path) -> None:
    domains = config.parent / "domains"
    (domains / "data").mkdir(parents=True)
    (domains / "data" / "a.jsonl").touch()
    (domains / "sums.yaml").write_text(
        "prompts: {source: jsonl, path: data/*.jsonl}\nrewards: {sum: {kind: math}}\n"
        "demonstrations: {source: parquet, path: chats, max_tokens: 300}\n"
    )
    edited(config, "prompts: {dataset: chain_sum}", "extends: domains/sums.yaml")
    assert faults(config) == [
        "domains/sums.yaml:3: domains.sums.demonstrations.max_tokens: 300 is more than "
        "model.max_positions = 256",
        "domains/sums.yaml:3: domains.sums.demonstrations.path: no file at domains/chats",
    ]
    (domains / "chats").mkdir()
    (domains / "chats" / "b.parquet").touch()
    few = "domains.sums.demonstrations.max_tokens=20"
    sums = load(config, [few]).domains["sums"]
    assert sums.prompts.files() == [domains / "data" / "a.jsonl"]
    assert sums.demonstrations.files() == [domains / "chats" / "b.parquet"]
    assert load(config, [few]).model.tokenizer == "characters"
    (domains / "data" / "a.jsonl").unlink()
    assert any("domains.sums.prompts.path: no file at" in fault for fault in faults(config, few))


def test_a_folder_is_looked_through_only_as_far_as_that_takes_seconds(
    config: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (config.parent / "data" / str(number)).mkdir(parents=True)
    (config.parent / "data" / "2" / "a.jsonl").touch()
    prompts = "prompts: {source: jsonl, path: data}\n    rewards: {sum: {kind: math}}"
    edited(config, "prompts: {dataset: chain_sum}", prompts)
    here = ("cold_start=null", f"model.initial_weights={start}")
    assert load(config, here).domains["sums"].prompts.files()
    monkeypatch.setattr("stages.data.sources.settings.MOST_DIRECTORIES", 3)
    [fault] = faults(config, *here)
    message = "sums.prompts.path: data has more than 3 directories below it; name a smaller one"
    assert fault.endswith(message)


def test_what_prompts_of_files_ask_of_other_blocks(config: Path) -> None:
    config.with_name("a.parquet").touch()
    prompts = "{source: parquet, path: ., max_prompt_tokens: 41}"
    edited(config, "{dataset: chain_sum}", prompts)
    assert faults(config) == [
        "small.yaml:17: domains.sums.rewards.exact.kind: only prompts.source: reasoning_gym has "
        "this scorer; use other rewards",
        "small.yaml:17: domains.sums.demonstrations.source: generated demonstrations need prompts "
        "of reasoning_gym, not of parquet; use jsonl or parquet, or cold_start: null in a run with "
        "model.initial_weights",
        "small.yaml:18: domains.sums.prompts.max_prompt_tokens: 41 and a response of 24 tokens are "
        "more than engine.max_model_tokens = 64",
    ]


def test_a_tokenizer_s_folder_is_looked_for_and_brings_its_own_vocabulary(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    wanted = ["model.tokenizer=chars", "model.vocabulary_size=96"]
    assert faults(config, *wanted) == [
        "command line: model.tokenizer: no such folder: chars; or use characters"
    ]
    config.with_name("chars").mkdir()
    assert load(config, wanted).model.tokenizer == str(config.with_name("chars"))


def test_a_mistyped_key_of_a_source_is_reported_where_it_stands(config: Path) -> None:
    edited(config, "{dataset: chain_sum}", "{source: jsonl, path: ., promt: question}")
    edited(config, "{dataset: spell_backward}", "{source: jsnl, path: .}")
    found = faults(config)
    assert any(
        'sums.prompts.promt: unknown key; did you mean "prompt"?' in fault for fault in found
    )
    message = "words.prompts.source: should be 'reasoning_gym', 'jsonl' or 'parquet', not \"jsnl\""
    assert any(message in fault for fault in found)
