"""Options of reasoning-gym datasets are checked before a run starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.validate import load
from stages.data import reasoning_gym
from stages.data.reasoning_gym import FORMATS, options
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


def test_without_reasoning_gym_options_are_not_checked(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.cache_clear()
    monkeypatch.setattr(reasoning_gym, "PACKAGE", "not_installed")
    load(config, [f"{KEY}={{max_term: 3}}"])
    options.cache_clear()


def test_options_match_the_datasets_config_classes() -> None:
    program = (
        "import json, warnings\n"
        "from dataclasses import fields\n"
        "warnings.simplefilter('ignore')\n"
        "import reasoning_gym\n"
        "from stages.data.reasoning_gym import FORMATS\n"
        "known = reasoning_gym.factory.DATASETS\n"
        "print(repr({name: {f.name: f.type.__name__ for f in fields(known[name][1])\n"
        "                   if f.name not in ('seed', 'size')} for name in FORMATS}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == repr({name: options(name) for name in FORMATS})
