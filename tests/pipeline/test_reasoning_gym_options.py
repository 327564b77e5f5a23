"""Options of reasoning-gym datasets are checked before a run starts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from tools.reasoning_gym_datasets import dataset_classes, described, text_of

from pipeline.config.validate import load
from stages.data import reasoning_gym_options
from stages.data.reasoning_gym_options import FILE, config_violation, installed, options
from tests.pipeline.violations import errors

KEY = "domains.sums.prompts.config"


@pytest.mark.parametrize(
    ("config_override", "message"),
    [
        ("max_term: 4", '.max_term: unknown option of chain_sum; did you mean "max_terms"?'),
        (
            "size: 4",
            ".size: unknown option of chain_sum; known: min_terms, max_terms, ",
        ),
        ("min_digits: grpo", '.min_digits: should be int, not "grpo"'),
        ("min_digits: 1.5", ".min_digits: should be int, not 1.5"),
        ("min_digits: true", ".min_digits: should be int, not true"),
        ("allow_negation: 1", ".allow_negation: should be bool, not 1"),
        ("max_terms: null", ".max_terms: should be int, not null"),
        ("max_terms: 1000000000", ".max_terms: should be between -1000 and 1000, not 1000000000"),
        (
            "m\u0456n_t\u0435rm\u0455: 3",
            ".m\u0456n_t\u0435rm\u0455: unknown option of chain_sum; 'm\\u0456n_t\\u0435rm\\u0455' "
            'has non-ASCII letters; did you mean "min_terms"?',
        ),
    ],
)
def test_a_wrong_option_is_reported_by_validate(
    config: Path, config_override: str, message: str
) -> None:
    [error] = errors(config, f"{KEY}={{{config_override}}}")
    assert error.startswith(f"command line: {KEY}{message}")


def test_valid_options_load_and_a_started_run_loads_with_wrong_ones(config: Path) -> None:
    load(config, [f"{KEY}={{min_terms: 3, allow_negation: true}}"])
    sorting = "{dataset: number_sorting, config: {max_value: 100000, min_value: -0.5}}"
    load(config, [f"domains.sums.prompts={sorting}"])
    load(config, [f"{KEY}={{max_term: 3}}"], to_start=False)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            "dataset: countdwn, form: chat",
            'dataset: no such dataset: countdwn; did you mean "count',
        ),
        (
            "dataset: countdown",
            "dataset: countdown has no compact text; use prompts.form: chat, or",
        ),
        (
            "dataset: composite, form: chat",
            "dataset: composite cannot be trained on: it has no problems of its own; make a domain",
        ),
        (
            "dataset: ransom_note, form: chat",
            "dataset: ransom_note draws its problems in the order of Python's sets, which differs "
            "between processes; set the environment variable PYTHONHASHSEED=0 for the run",
        ),
        (
            "dataset: countdown, form: chat, config: {min_number: 3}",
            'config.min_number: unknown option of countdown; did you mean "min_numbers"?',
        ),
        (
            "dataset: countdown, form: chat, config: {min_numbers: 30}",
            "config: countdown: max_numbers must be >= min_numbers",
        ),
        (
            "dataset: chain_sum, config: {min_terms: 9}",
            "config: chain_sum: max_terms must be >= min_terms",
        ),
    ],
)
def test_a_dataset_that_cannot_be_drawn_is_reported_by_validate(
    config: Path, prompts: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = errors(config, "stages.cold_start=null", f"domains.sums.prompts={{{prompts}}}")
    assert [each for each in found if message in each], found
    assert all("line:" in each or ".yaml:" in each for each in found)


def test_any_dataset_is_valid_and_has_no_generated_demonstrations(config: Path) -> None:
    found = errors(config, "domains.sums.prompts={dataset: countdown, form: chat}")
    [error] = [each for each in found if "demonstrations" in each]
    assert "generated demonstrations require prompts.form: compact, not chat; use jsonl" in error


def test_without_reasoning_gym_options_are_not_checked(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasoning_gym_options, "PACKAGE", "not_installed")
    installed.cache_clear()
    load(config, [f"{KEY}={{max_term: 3}}"])
    installed.cache_clear()


def test_the_file_has_what_importing_the_package_finds() -> None:
    """`python -m tools.reasoning_gym_datasets` writes it again for another version."""
    assert FILE.read_text() == text_of(described())
    unreadable = set()
    for name, (_, config_class) in dataset_classes().items():
        known = options(name)
        assert known is not None
        assert known.keys() == {field.name for field in fields(config_class)} - {"seed", "size"}
        assert name == "composite" or config_violation(name, {}) is None
        if config_violation(name, {"no_such": 1}) is None:
            unreadable.add(name)
    assert unreadable == {"figlet_font"}  # its defaults are of another package
