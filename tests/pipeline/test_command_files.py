"""A command is found by its file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    ("word", "all_are_imported"),
    [("status", False), ("statsu", True), ("support", True), ("", True)],
)
def test_the_first_word_s_command_is_imported_alone(word: str, all_are_imported: bool) -> None:
    """All where it names none: the help and the message of a misspelt word list them."""
    program = (
        "import json, sys\n"
        "from pipeline import cli\n"
        "from pipeline.commands.support import registry\n"
        "cli.command_parser(sys.argv[1]); print(json.dumps([*registry.COMMANDS]))"
    )
    imported = subprocess.run(
        [sys.executable, "-c", program, word], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True
    )
    found = set(json.loads(imported.stdout))
    cli.command_parser()
    assert {"status", "plan"} <= registry.COMMANDS.keys()
    assert found == (registry.COMMANDS.keys() if all_are_imported else {word})


def test_a_misspelt_command_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for typed, meant in (("stauts", 'did you mean "status"?'), ("gat", 'did you mean "gate"?')):
        with pytest.raises(SystemExit, match="2"):
            cli.main([typed, "small"])
        assert capsys.readouterr().err == f"braid: no command {typed}; {meant}\n"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["xyz"])
    assert "no command xyz; known: validate, plan, " in capsys.readouterr().err
