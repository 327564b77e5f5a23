"""Paths of prompts, demonstrations and tokenizers in a configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config.validate import load
from tests.pipeline.violations import MIXED, edited, errors, from_weights


def test_paths_are_relative_to_the_file_that_names_them(config: Path) -> None:
    domains = config.parent / "domains"
    (domains / "data").mkdir(parents=True)
    (domains / "data" / "a.jsonl").touch()
    (domains / "sums.yaml").write_text(
        "prompts: {source: jsonl, path: data/*.jsonl}\nrewards: {sum: {kind: math}}\n"
        "demonstrations: {source: parquet, path: chats, max_tokens: 300}\n"
    )
    edited(config, "prompts: {dataset: chain_sum}", "extends: domains/sums.yaml")
    assert errors(config) == [
        "domains/sums.yaml:3: domains.sums.demonstrations.max_tokens: 300 is more than "
        "model.max_positions = 256",
        "domains/sums.yaml:3: domains.sums.demonstrations.path: no such file: domains/chats",
    ]
    (domains / "chats").mkdir()
    (domains / "chats" / "b.parquet").touch()
    few = "domains.sums.demonstrations.max_tokens=20"
    sums = load(config, [few]).domains["sums"]
    assert sums.prompts.files() == [domains / "data" / "a.jsonl"]
    assert sums.demonstrations.files() == [domains / "chats" / "b.parquet"]
    assert load(config, [few]).model.tokenizer == "characters"
    (domains / "data" / "a.jsonl").unlink()
    assert any("domains.sums.prompts.path: no such file:" in error for error in errors(config, few))


def test_the_search_below_a_directory_is_limited(
    config: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (config.parent / "data" / str(number)).mkdir(parents=True)
    (config.parent / "data" / "2" / "a.jsonl").touch()
    prompts = "prompts: {source: jsonl, path: data}\n    rewards: {sum: {kind: math}}"
    edited(config, "prompts: {dataset: chain_sum}", prompts)
    from_weights(config, start)
    assert load(config).domains["sums"].prompts.files()
    monkeypatch.setattr("stages.data.settings.MOST_DIRECTORIES", 3)
    [error] = errors(config)
    message = "sums.prompts.path: data has more than 3 directories below it; name a smaller one"
    assert error.endswith(message)


def test_prompts_from_files_are_checked_against_other_blocks(config: Path) -> None:
    config.with_name("a.parquet").touch()
    prompts = "{source: parquet, path: ., max_prompt_tokens: 41}"
    edited(config, "{dataset: chain_sum}", prompts)
    assert errors(config) == [
        "small.yaml:14: domains.sums.rewards.exact.kind: only prompts.source: reasoning_gym has "
        "this scorer; use other rewards",
        "small.yaml:14: domains.sums.demonstrations.source: generated demonstrations require "
        "prompts.source: reasoning_gym, not parquet; use jsonl or parquet, or start without "
        "stages.cold_start: extends: pipelines/experts-merge-from-weights.yaml, with "
        "model.initial_weights",
        "small.yaml:15: domains.sums.prompts.max_prompt_tokens: 41 prompt and 24 response tokens "
        "exceed engine.max_model_tokens = 64",
    ]


@pytest.mark.parametrize("block", ["domains.sums", "stages.merge", "stages.mixed"])
def test_the_longest_response_of_all_that_sample_a_prompt_must_fit(
    block: str, config: Path
) -> None:
    config.with_name("a.parquet").touch()
    edited(config, "{dataset: chain_sum}", "{source: parquet, path: ., max_prompt_tokens: 33}")
    fits, exceeds = (
        [
            error
            for error in errors(config, MIXED, f"{block}.sampling.max_response_tokens={most}")
            if "max_prompt_tokens" in error
        ]
        for most in (31, 32)
    )
    assert fits == []
    [error] = exceeds
    assert error.endswith("33 prompt and 32 response tokens exceed engine.max_model_tokens = 64")


def test_the_responses_of_other_domains_may_be_longer(config: Path) -> None:
    config.with_name("a.parquet").touch()
    edited(config, "{dataset: chain_sum}", "{source: parquet, path: ., max_prompt_tokens: 33}")
    shorter = ("domains.sums.sampling.max_response_tokens=20",)
    apart = (
        "stages.merge.teachers={words: experts}",
        "stages.merge.domains=[words]",
        "domains.words.sampling.max_response_tokens=40",
    )
    found = errors(config, *shorter, *apart)
    assert not [error for error in found if "max_prompt_tokens" in error]


def test_a_tokenizers_directory_must_exist_and_sets_the_vocabulary(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    wanted = ["model.tokenizer=chars", "model.vocabulary_size=96"]
    assert errors(config, *wanted) == [
        "command line: model.tokenizer: no such directory: chars; use a tokenizer's, or characters"
    ]
    chars = config.with_name("chars")
    chars.mkdir()
    [error] = errors(config, *wanted)
    assert "model.tokenizer: chars has no tokenizer (tokenizer.json, " in error
    os.mkfifo(chars / "tokenizer.json")  # which would be read for ever
    [error] = errors(config, *wanted)
    assert error.endswith("chars/tokenizer.json: is not a file; copy the tokenizer's there")
    (chars / "tokenizer.json").unlink()
    (chars / "tokenizer.json").write_text("{}")
    assert load(config, wanted).model.tokenizer == str(config.with_name("chars"))


def test_a_mistyped_key_of_a_source_is_reported(config: Path) -> None:
    edited(config, "{dataset: chain_sum}", "{source: jsonl, path: ., promt: question}")
    edited(config, "{dataset: spell_backward}", "{source: jsnl, path: .}")
    found = errors(config)
    assert any(
        'sums.prompts.promt: unknown key; did you mean "prompt"?' in error for error in found
    )
    sources = "'reasoning_gym', 'jsonl', 'parquet' or 'arrow'"
    message = f'words.prompts.source: should be {sources}, not "jsnl"'
    assert any(message in error for error in found)


def test_the_first_rows_of_a_domain_are_checked_before_anything_runs(config: Path) -> None:
    prompts, chats = config.with_name("a.jsonl"), config.with_name("b.jsonl")
    edited(
        config,
        "prompts: {dataset: chain_sum}",
        "prompts: {source: jsonl, path: a.jsonl, answer: answer}\n    rewards: {sum: {kind: math}}"
        "\n    demonstrations: {source: jsonl, path: b.jsonl}",
    )
    prompts.write_text('{"prompt": "1+1", "answer": 2}\n\n{"prompt": "1+2", "anwser": "3"}\n')
    chats.write_text('{"messages": [{"role": "assistant", "content": "2"}]}\n')
    fix = "fix it, or skip such rows with domains.sums."
    assert errors(config) == [
        "small.yaml:15: domains.sums.prompts: a.jsonl:3: no column 'answer'; columns: 'prompt', "
        f"'anwser'; the nearest: 'anwser'; {fix}prompts.on_bad_row: skip",
        "small.yaml:17: domains.sums.demonstrations: b.jsonl:1: 'messages' must not start with "
        f"an assistant turn; {fix}demonstrations.on_bad_row: skip",
    ]
    chats.write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    [_, error] = errors(config)
    assert "b.jsonl:1: 'messages' has no assistant turn to train on" in error
    skipped = [f"domains.sums.{each}.on_bad_row=skip" for each in ("prompts", "demonstrations")]
    load(config, skipped)
