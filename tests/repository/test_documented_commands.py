"""Every command that a page, the Makefile or a docstring names can be given.

Those of EXECUTED are executed; the others of `braid` are parsed by its own parser, targets of Make
expanded, and options of Python programs found in their source. A program or a command that no list
names fails: decide whether it can be executed here.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config.validate import load, load_with_domain
from tests.repository import documented
from tests.repository.documented import BRAIDS, OTHERS, PYTHONS, DocumentedCommand, source_of
from tests.runs import REPOSITORY

COMMANDS = [*documented.of_pages()]
MEMORY = "plan tests/pipeline/memory_cases/qwen3_30b_a3b.yaml --memory"
QUICKSTART = "configs/quickstart.yaml"
# By the code with which they end. Runs, engines and screens are tested in tests/end_to_end.
EXECUTED = {
    f"{MEMORY} --cluster tests/pipeline/memory_cases/h100.yaml": 0,
    f"validate {QUICKSTART}": 0,
    f"plan {QUICKSTART}": 0,
    f"validate {QUICKSTART} domains.chain_sum.objective.kl.coeficient=0 layout.expert=3": 1,
    "domain new geometry": 0,
    "domain check configs/domains/geometry.yaml": 0,
}
# Need a finished run, a cluster, a model's weights or a GPU.
PARSED = {
    *("audit", "bundle", "cancel", "compare", "diff", "domain", "doctor", "evaluate", "export"),
    *("gate", "init", "logs", "look", "plan", "report", "resume", "run", "simulate"),
    *("status", "submit", "validate", "why"),
}
# Of packages that this environment does not have: `make bench-trl` builds theirs.
OTHER_ENVIRONMENTS = {"trl_preference", "trl_steps"}
BENCHMARKS = sorted(path.stem for path in (REPOSITORY / "benchmarks").glob("*.py"))


def test_every_program_is_known() -> None:
    unknown = [
        str(command)
        for command in COMMANDS
        if command.words[0] not in PYTHONS | BRAIDS | OTHERS | {"make"}
    ]
    assert unknown == []
    assert len(COMMANDS) > 80


def test_every_command_of_braid_is_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    failed = []
    for command in COMMANDS:
        if command.words[0] not in BRAIDS:
            continue
        assert command.words[1] in PARSED, f"{command}: add it to PARSED or EXECUTED"
        try:
            cli._parse(command.words[1:])
        except SystemExit:
            failed.append(f"{command}: {capsys.readouterr().err}")
    assert failed == []


def test_every_target_of_make_can_be_made() -> None:
    targets = {
        word
        for command in COMMANDS
        if command.words[0] == "make"
        for word in command.words[1:]
        if "=" not in word
    }
    listed = re.findall(r"^([a-z-]+):.*##", (REPOSITORY / "Makefile").read_text(), re.M)
    assert targets <= set(listed)
    expanded = subprocess.run(
        ["make", "-n", *sorted({*listed} - {"clean"})],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert expanded.returncode == 0, expanded.stderr


def test_every_python_program_has_the_options_that_it_is_given() -> None:
    commands = [*COMMANDS, *documented.of_makefile(), *documented.of_docstrings()]
    checked, failed = 0, []
    for command in commands:
        if command.words[0] not in PYTHONS or not (source := source_of(command.words)):
            continue
        if not source.exists():
            failed.append(f"{command}: no file {source.name}")
            continue
        text = source.read_text()
        options = [word.partition("=")[0] for word in command.words if word.startswith("--")]
        failed += [f"{command}: {each}" for each in options if f'"{each}"' not in text]
        checked += 1
    assert failed == []
    assert checked > 30


def test_the_benchmarks_are_imported_without_a_warning_of_their_own() -> None:
    """One process, for torch takes seconds to import. Types are those of `make lint`."""
    names = [name for name in BENCHMARKS if name not in OTHER_ENVIRONMENTS]
    program = (
        "import importlib, warnings\n"
        f"names = {names}\n"
        "for name in names:\n"
        "    warnings.filterwarnings('error', module=rf'{name}$')\n"
        "    importlib.import_module(name)\n"
    )
    imported = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", program],
        cwd=REPOSITORY / "benchmarks",
        capture_output=True,
        text=True,
    )
    assert imported.returncode == 0, imported.stderr
    for name in OTHER_ENVIRONMENTS:
        compile((REPOSITORY / "benchmarks" / f"{name}.py").read_text(), name, "exec")


def test_the_new_domain_of_the_pages_can_be_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each documented line is given in its order, in a copy of the repository's configurations."""
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    (tmp_path / "tests").symlink_to(REPOSITORY / "tests")
    monkeypatch.chdir(tmp_path)
    given = {shlex.join(each.words[1:]): each for each in COMMANDS if each.words[0] in BRAIDS}
    for line, code in EXECUTED.items():
        assert line in given, f"no page names braid {line}"
        assert _ended(given[line]) == code, (line, capsys.readouterr())
    # With the model of the quickstart, whose engine has room for 64 tokens:
    assert "domain check configs/domains/geometry.yaml --run quickstart --stage cold_start" in given
    load_with_domain(Path(QUICKSTART), Path("configs/domains/geometry.yaml"))
    page = (REPOSITORY / "docs" / "how-to" / "domain.md").read_text()
    [text] = re.findall(r"```yaml\n(# configs/try_geometry.yaml\n.*?)```", page, re.S)
    Path("configs/try_geometry.yaml").write_text(text)
    settings = load(Path("configs/try_geometry.yaml"), to_start=False)
    assert [*settings.domains] == ["geometry"]
    # Its problems are generated: no evaluation asks for more than there are.
    assert settings.domains["geometry"].prompts.source == "reasoning_gym"


def _ended(command: DocumentedCommand) -> int:
    try:
        return cli.main([*command.words[1:]])
    except SystemExit as error:
        return int(error.code or 0)
