"""A command is found by its file, and the page that says how to add one is true."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline import cli, commands
from pipeline.commands.support import registry
from tests.runs import REPOSITORY

Braid = Callable[..., tuple[int, str, str]]
PAGE = REPOSITORY / "docs" / "how-to" / "command.md"


def test_a_file_has_the_command_of_its_name_and_no_other() -> None:
    cli.command_parser()
    files = {path.stem for path in (REPOSITORY / "pipeline" / "commands").glob("*.py")}
    words: dict[str, set[str]] = {file: set() for file in files - {"__init__"}}
    for name, command in registry.COMMANDS.items():
        words[command.function.__module__.rpartition(".")[2]].add(name.partition(" ")[0])
    assert words == {file: {file} for file in words}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command of the page, in a file of one more directory of commands."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands" / "hello.py").write_text(textwrap.dedent(code))
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path / "commands")])
    monkeypatch.setattr(registry, "COMMANDS", dict(registry.COMMANDS))
    monkeypatch.setattr(commands, "hello", None, raising=False)  # removed after the test
    yield
    sys.modules.pop("pipeline.commands.hello", None)


@pytest.mark.usefixtures("example")
def test_the_command_of_the_page_needs_no_other_file(braid: Braid, config: Path) -> None:
    assert braid("run", config)[0] == 0
    assert braid("hello", "small") == (0, "small: 6 of 6 stages are done\n", "")
    assert json.loads(braid("hello", "small", "--json")[1]) == {"run": "small", "done": 6}
    listed = re.findall(r"^    (\w+) ", cli.command_parser().format_help(), re.MULTILINE)
    assert listed[-1] == "hello", "without a place it is last"
