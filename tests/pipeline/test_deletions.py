"""`null` for a domain or a reward deletes the inherited one."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.validate import load
from tests.pipeline.violations import errors


def child(config: Path, text: str) -> Path:
    """Write a file that extends the configuration."""
    path = config.with_name("child.yaml")
    path.write_text(f"extends: {config.name}\n{text}")
    return path


def with_brief(config: Path) -> Path:
    """Give the configuration's first domain two rewards."""
    rewards = (
        "  sums:\n    rewards:\n      exact: {kind: reasoning_gym}\n"
        "      brief: {kind: overlong, max_tokens: 20, buffer_tokens: 4}\n"
    )
    config.write_text(config.read_text().replace("  sums:\n", rewards, 1))
    return config


def test_an_inherited_domain_is_deleted(config: Path) -> None:
    settings = load(child(config, "domains: {sums: null}\n"))
    assert list(settings.domains) == ["words"]
    assert list(load(config, ["domains.words=null"]).domains) == ["sums"]


def test_a_deleted_domain_may_be_defined_again(config: Path) -> None:
    middle = child(config, "domains: {sums: null}\n")
    last = config.with_name("last.yaml")
    domain = "{prompts: {dataset: chain_sum}, optimizer: {learning_rate: 1e-2}, loop: {steps: 3}}"
    last.write_text(f"extends: {middle.name}\ndomains:\n  sums: {domain}\n")
    assert load(last).domains["sums"].loop.steps == 3


def test_an_inherited_reward_is_deleted(config: Path) -> None:
    path = child(with_brief(config), "domains: {sums: {rewards: {brief: null}}}\n")
    assert list(load(path).domains["sums"].rewards) == ["exact"]
    assert list(load(config, ["domains.sums.rewards.exact="]).domains["sums"].rewards) == ["brief"]


def test_a_null_that_deletes_nothing_is_an_error(config: Path) -> None:
    path = child(
        with_brief(config),
        "domains:\n  sumz: null\n  sums:\n    rewards: {breif: null}\n",
    )
    message = "null deletes an inherited name, and there is none; did you mean"
    assert errors(path) == [
        f'child.yaml:3: domains.sumz: {message} "sums"?',
        f'child.yaml:5: domains.sums.rewards.breif: {message} "brief"?',
    ]


def test_a_reference_to_a_deleted_domain_is_an_error(config: Path) -> None:
    assert errors(config, "stages.export.from=experts.sums", "domains.sums=null") == [
        'command line: stages.export.from: no such stage: experts.sums; did you mean "experts"?'
    ]


def test_one_domain_must_remain(config: Path) -> None:
    assert errors(child(config, "domains: {sums: null, words: null}\n")) == [
        "child.yaml:2: domains: should have at least 1 item, not 0"
    ]
