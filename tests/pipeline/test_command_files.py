"""A command is found by its file."""

from __future__ import annotations

from pipeline import cli
from pipeline.commands.support import registry
from tests.runs import REPOSITORY


def test_a_file_has_the_command_of_its_name_and_no_other() -> None:
    cli.command_parser()
    files = {path.stem for path in (REPOSITORY / "pipeline" / "commands").glob("*.py")}
    words: dict[str, set[str]] = {file: set() for file in files - {"__init__"}}
    for name, command in registry.COMMANDS.items():
        words[command.function.__module__.rpartition(".")[2]].add(name.partition(" ")[0])
    assert words == {file: {file} for file in words}
