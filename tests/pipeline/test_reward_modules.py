"""Where a reward of one's own is looked for, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.environment import function_fault
from pipeline.config.validate import load
from pipeline.config.violations import ConfigError


def own(function: str) -> str:
    """An override that gives a domain a reward of one's own."""
    return f"domains.sums.rewards={{own: {{kind: python, function: {function}}}}}"


def test_a_reward_of_one_s_own_is_found_in_the_working_directory(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    rewards = config.with_name("my_rewards.py")
    rewards.write_text("def half(problem, response):\n    return 0.5\n")
    load(config, [own("my_rewards:half")])
    rewards.write_text("def half(problem, response)\n")
    key = "domains.sums.rewards.own.function"
    with pytest.raises(ConfigError) as caught:
        load(config, [own("my_rewards:half")])
    assert f"command line: {key}: my_rewards.py:1 is not valid Python: expected ':'" in str(
        caught.value
    )
    with pytest.raises(ConfigError) as caught:
        load(config, [own(".my:half")])
    assert (
        f"command line: {key}: no module .my in the working directory or among Python's packages"
        in str(caught.value)
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("half: object = print", True),
        ("try:\n    from rewards import half\nexcept ImportError:\n    half = print", True),
        ("if True:\n    import rewards as half", True),
        ("from rewards import *", True),
        ("def whole(problem, response):\n    half = 0.5\n    return half", False),
        ("class Rewards:\n    half = print", False),
    ],
)
def test_a_reward_is_whatever_its_module_binds(
    config: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: bool
) -> None:
    monkeypatch.chdir(config.parent)
    config.with_name("my_rewards.py").write_text(text)
    fault = function_fault("my_rewards:half")
    assert fault == (None if found else "my_rewards.py defines no half")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = " + "(" * 5000 + ")" * 5000, "is not valid Python: too many nested parentheses"),
        ("x = " + "-" * 100_000 + "1", "cannot be read: "),
        ("x = 1" + " + 1" * 100_000, "cannot be read: "),
        ("x = '\0'", "is not valid Python: "),
    ],
)
def test_a_module_that_python_cannot_take_is_one_fault(
    config: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.chdir(config.parent)
    config.with_name("my_rewards.py").write_text(text)
    fault = function_fault("my_rewards:half")
    assert fault is not None and fault.startswith("my_rewards.py") and reason in fault


def test_a_module_in_what_is_no_package_is_said_to_be_there(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    config.with_name("my_rewards.py").write_text("half = print")
    assert function_fault("os.path:join") == (
        "os is a module and no package: name the module whose file defines join, not os.path"
    )
    assert function_fault("my_rewards.more:half") == (
        "my_rewards is a module and no package: name the module whose file defines half, not "
        "my_rewards.more"
    )


def test_packages_around_a_reward_need_no_init(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    folder = config.parent / "outer_package" / "inner_package"
    folder.mkdir(parents=True)
    (folder / "my_rewards.py").write_text("half = print")
    assert function_fault("outer_package.inner_package.my_rewards:half") is None
    assert function_fault("outer_package.inner_package.others:half") is not None
