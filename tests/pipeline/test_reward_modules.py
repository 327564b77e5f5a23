"""The lookup of a Python reward's function before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.environment import function_violation
from pipeline.config.modules import module_files
from pipeline.config.validate import load
from tests.pipeline.violations import errors, own


def test_a_python_reward_is_found_in_the_working_directory(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    rewards = config.with_name("my_rewards.py")
    rewards.write_text("def half(problem, response):\n    return 0.5\n")
    load(config, [own("my_rewards:half")])
    rewards.write_text("def half(problem, response)\n")
    key = "domains.sums.rewards.own.function"
    invalid = f"command line: {key}: my_rewards.py:1 is not valid Python: expected ':'"
    assert invalid in "\n".join(errors(config, own("my_rewards:half")))
    missing = f"command line: {key}: no module .my in the working directory or on sys.path"
    assert missing in "\n".join(errors(config, own(".my:half")))


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
def test_a_function_is_any_name_that_its_module_binds(
    config: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: bool
) -> None:
    monkeypatch.chdir(config.parent)
    config.with_name("my_rewards.py").write_text(text)
    error = function_violation("my_rewards:half")
    assert error == (None if found else "my_rewards.py defines no half")


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("def half(problem, text, *, share=0.5): ...", True),
        ("def half(problem, text='', more=1): ...", True),
        ("def half(*values): ...", True),
        ("@wrapped\ndef half(sample): ...", True),  # the decorator may call it in its own way
        ("def half(sample): ...\nhalf = wrapped(half)", True),
        ("def half(sample): ...", False),
        ("def half(problem, text, tokenizer): ...", False),
        ("def half(problem, text, *, share): ...", False),
        ("async def half(problem, text): ...", False),
    ],
)
def test_a_function_takes_a_problem_and_a_response(
    config: Path, monkeypatch: pytest.MonkeyPatch, text: str, takes: bool
) -> None:
    monkeypatch.chdir(config.parent)
    config.with_name("my_rewards.py").write_text(text)
    error = (
        "my_rewards.py:1: a reward is called as half(problem, response) and returns its value; "
        f"it cannot be called as {text.removesuffix(': ...').removesuffix(':')}"
    )
    assert function_violation("my_rewards:half") == (None if takes else error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = " + "(" * 5000 + ")" * 5000, "is not valid Python: too many nested parentheses"),
        ("x = " + "-" * 100_000 + "1", "cannot be read: "),
        ("x = 1" + " + 1" * 100_000, "cannot be read: "),
        ("x = '\0'", "is not valid Python: "),
    ],
)
def test_a_module_that_python_cannot_parse_is_one_error(
    config: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.chdir(config.parent)
    config.with_name("my_rewards.py").write_text(text)
    error = function_violation("my_rewards:half")
    assert error is not None and error.startswith("my_rewards.py") and reason in error


def test_a_module_used_as_a_package_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    config.with_name("my_rewards.py").write_text("half = print")
    assert function_violation("os.path:join") == (
        "os is a module, not a package; name the module whose file defines join, not os.path"
    )
    assert function_violation("my_rewards.more:half") == (
        "my_rewards is a module, not a package; name the module whose file defines half, not "
        "my_rewards.more"
    )


def test_namespace_packages_are_searched(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    directory = config.parent / "outer_package" / "inner_package"
    directory.mkdir(parents=True)
    (directory / "my_rewards.py").write_text("half = print")
    assert function_violation("outer_package.inner_package.my_rewards:half") is None
    assert function_violation("outer_package.inner_package.others:half") is not None


@pytest.mark.parametrize(
    ("line", "followed"),
    [
        ("import parts.inner", True),
        ("from parts import inner", True),
        ("from .parts import inner", True),
        ("from parts.inner import x", True),
        ("def f():\n    import parts.inner", True),
        ("import parts", False),
        ("import json, stages.keys", False),
        ("__import__('parts.inner')", False),
        ("def f(", False),
    ],
)
def test_the_files_of_a_module_are_those_that_its_import_statements_name(
    line: str, followed: bool, tmp_path: Path
) -> None:
    package = tmp_path / "own"
    inner = tmp_path / ("own/parts" if "." in line.partition(" import")[0][:6] else "parts")
    inner.mkdir(parents=True)
    package.mkdir(exist_ok=True)
    for path in (package / "__init__.py", inner / "__init__.py", inner / "inner.py"):
        path.write_text("import own.rewards\nx = 1\n")  # a circle
    (package / "rewards.py").write_text(f"{line}\n")
    (tmp_path / "json.py").write_text("")
    found = module_files("own.rewards", tmp_path)
    assert found is not None and not found.installed
    assert found.root == tmp_path
    assert {package / "__init__.py", package / "rewards.py"} <= set(found.files)
    assert (inner / "inner.py" in found.files) == followed
    assert (tmp_path / "json.py" in found.files) == ("json" in line)


def test_of_installed_and_compiled_modules_at_most_one_file_is_followed() -> None:
    found = module_files("pytest")
    assert found is not None and found.installed
    assert [path.name for path in found.files] == ["__init__.py"]
    assert module_files("math") is None and module_files("no_such_module_anywhere") is None
