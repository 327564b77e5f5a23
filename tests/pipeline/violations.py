"""The violations of a configuration, and overrides of the smallest one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.read import ConfigError
from pipeline.config.validate import load
from tests.runs import REPOSITORY

TRAINED = "{optimizer: {learning_rate: 1e-3}, loop: {steps: 2}}"
MIXED = f"stages={{mixed: {{kind: grpo, from: cold_start, {TRAINED[1:]}}}"


def errors(path: Path, *overrides: str) -> list[str]:
    """Return every violation of a configuration, paths relative to the test's directory."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return [str(violation).replace(f"{path.parent}/", "") for violation in caught.value.violations]


def violation(path: Path, *overrides: str) -> str:
    """Return the only violation of a configuration."""
    [found] = errors(path, *overrides)
    return found


def cells(line: str) -> list[str]:
    """Return the words of a row of a plan, without the branches of its tree."""
    return line.lstrip("│├└─ ").split()


def edited_copy(config: Path, *pairs: tuple[str, str]) -> Path:
    """Return a copy of a configuration with texts replaced; the original stays."""
    text = config.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path = config.with_name("edited.yaml")
    path.write_text(text)
    return path


def edited(config: Path, old: str, new: str) -> Path:
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    return config


def extending(config: Path, template: str, *trained: str) -> Path:
    """Have the smallest configuration take its stages from a template.

    It states the optimizer and the loop of the blocks `trained`.
    """
    head, _, _ = config.read_text().partition("stages:\n")
    path = REPOSITORY / "configs" / "pipelines" / f"{template}.yaml"
    stated = [f"  {name}: {TRAINED}\n" for name in trained]
    config.write_text("".join([f"extends: {path}\n{head}", *["stages:\n"] * bool(stated), *stated]))
    return config


def from_weights(config: Path, start: Path) -> Path:
    """Have the smallest configuration start from the checkpoint `start`, without a cold start."""
    extending(config, "experts-merge-from-weights", "merge")
    return edited(config, "model:\n", f"model:\n  initial_weights: {start}\n")


def with_mixed(config: Path) -> Path:
    """Add a stage that trains on all domains at once."""
    mixed = (
        "mixed: {kind: grpo, from: cold_start, optimizer: {learning_rate: 1e-3}, loop: {steps: 2}}"
    )
    return edited(config, "  evaluate: {", f"  {mixed}\n  evaluate: {{")


def own(function: str) -> str:
    """Return an override that gives a domain a custom Python reward."""
    return f"domains.sums.rewards={{own: {{kind: python, function: {function}}}}}"


def rewards(reward: str) -> str:
    """Return an override that gives a domain one reward, called a."""
    return f"domains.sums.rewards={{a: {reward}}}"


def judge(**changes: object) -> str:
    """Return an override that gives a domain one judge, called a."""
    settings = {"kind": "judge", "base_url": "http://x/v1", "model": "m", "rubric": "{response}?"}
    return rewards(json.dumps({**settings, **changes}))


def with_data(config: Path, path: Path) -> Path:
    """Make the domain `words` one of files."""
    files = f"{{source: jsonl, path: '{path}', answer: answer}}"
    text = config.read_text().replace("{dataset: spell_backward}", files)
    text = text.replace("kind: sft\n", "kind: sft\n    domains: [sums]\n")
    text += "evaluation: {problems: 4}\n"
    config.write_text(text)
    return config


@pytest.fixture(name="config")
def config_with_rows(config: Path, rows: Path) -> Path:
    """The smallest configuration, with a domain of files; a module's, where it is imported."""
    return with_data(config, rows)
