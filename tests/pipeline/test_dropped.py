"""`null` for a name of one's own drops what an extended file defines."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.validate import load
from pipeline.config.violations import ConfigError


def child(config: Path, text: str) -> Path:
    """A file that extends the configuration."""
    path = config.with_name("child.yaml")
    path.write_text(f"extends: {config.name}\n{text}")
    return path


def faults(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return [str(violation).replace(f"{path.parent}/", "") for violation in caught.value.violations]


def with_brief(config: Path) -> Path:
    """The configuration, whose first domain has two rewards."""
    rewards = (
        "  sums:\n    rewards:\n      exact: {kind: reasoning_gym}\n"
        "      brief: {kind: overlong, max_tokens: 20, buffer_tokens: 4}\n"
    )
    config.write_text(config.read_text().replace("  sums:\n", rewards, 1))
    return config


def test_an_inherited_expert_is_dropped(config: Path) -> None:
    settings = load(child(config, "domains: {sums: null}\n"))
    assert list(settings.domains) == ["words"]
    assert list(load(config, ["domains.words=null"]).domains) == ["sums"]


def test_a_dropped_expert_may_be_defined_again(config: Path) -> None:
    middle = child(config, "domains: {sums: null}\n")
    last = config.with_name("last.yaml")
    domain = "{prompts: {dataset: chain_sum}, optimizer: {learning_rate: 1e-2}, loop: {steps: 3}}"
    last.write_text(f"extends: {middle.name}\ndomains:\n  sums: {domain}\n")
    assert load(last).domains["sums"].loop.steps == 3


def test_an_inherited_reward_is_dropped(config: Path) -> None:
    path = child(with_brief(config), "domains: {sums: {rewards: {brief: null}}}\n")
    assert list(load(path).domains["sums"].rewards) == ["exact"]
    assert list(load(config, ["domains.sums.rewards.exact="]).domains["sums"].rewards) == ["brief"]


def test_a_null_that_drops_nothing_is_a_fault(config: Path) -> None:
    path = child(
        with_brief(config),
        "domains:\n  sumz: null\n  sums:\n    rewards: {breif: null}\n",
    )
    drops = "null drops what an extended file defines, and none defines it; did you mean"
    assert faults(path) == [
        f'child.yaml:3: domains.sumz: {drops} "sums"?',
        f'child.yaml:5: domains.sums.rewards.breif: {drops} "brief"?',
    ]


def test_what_is_dropped_is_missed_by_what_names_it(config: Path) -> None:
    assert faults(config, "domains.words.from=experts.sums", "domains.sums=null") == [
        "command line: domains.words.from: no such stage: experts.sums; did you mean "
        '"experts.words"?'
    ]


def test_something_is_left(config: Path) -> None:
    assert faults(child(config, "domains: {sums: null, words: null}\n")) == [
        "child.yaml:2: domains: should have at least 1 item, not 0"
    ]
