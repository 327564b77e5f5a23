"""Kinds of stages and families of models are known by their traits: few files name one.

A kind of an installed package, or a new family, has a name that no code can know. What asks for a
name works for the built-in ones alone, and nothing says so.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import fields

import pytest
from tools.structure import FLOORS, REPOSITORY

from parallel.families import FAMILIES
from stages.kinds import KINDS
from stages.kinds.kind import StageKind

REGISTRARS = {"command", "group"}  # of commands
# Literals that are equal to a kind's name and mean something else, by file.
MEANS_NO_KIND = {
    "pipeline/report/page/redaction.py": {"sample"},  # a phase of a timeline
    "pipeline/report/screens/samples.py": {"sample"},  # the id of a widget
}
# A family's names of tensors and the bridge that builds it are the family; one field lists them.
NAMES_A_FAMILY = {
    "parallel/families.py",
    "parallel/settings.py",
    "parallel/weights/names.py",
    "parallel/model/bridge.py",
    "stages/audit/model.py",  # a formula of its own for the one family that it recomputes
}


def literals(tree: ast.Module, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, literal) of each string equal to one of `names`, but for names of commands.

    `braid export` is named like the kind: `@command("export", ...)`, `group("gate", ...)`.
    """
    commands = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in REGISTRARS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names and id(node) not in commands:
            yield node.lineno, str(node.value)


def named(floors: Collection[str], names: Collection[str]) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, literal) of each of `names` in the sources of these floors."""
    for floor in floors:
        for path in sorted((REPOSITORY / floor).rglob("*.py")):
            file = str(path.relative_to(REPOSITORY))
            for line, literal in literals(ast.parse(path.read_text()), names):
                yield file, line, literal


def test_the_pipeline_names_no_kind_of_stage() -> None:
    violations = [
        f"{file}:{line}: {kind!r}; ask for a trait of StageKind, or import the kind's constant"
        for file, line, kind in named(["pipeline"], KINDS)
        if kind not in MEANS_NO_KIND.get(file, set())
    ]
    assert not violations, "\n".join(violations)


def test_the_pipeline_asks_for_every_trait() -> None:
    asked = {
        node.attr
        for path in (REPOSITORY / "pipeline").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    traits = {field.name for field in fields(StageKind) if field.type == "bool"}
    assert traits and traits <= asked


def test_the_kinds_that_are_audited_are_those_that_the_audit_names() -> None:
    files = ("stages/audit/main.py", "stages/audit/stage_audit.py")
    known = {kind for file, _, kind in named(["stages/audit"], KINDS) if file in files}
    assert known == {name for name, kind in KINDS.items() if kind.audited}


def test_what_a_gate_measures_is_no_evaluation_of_the_run() -> None:
    """It may be of few problems, and would replace what an evaluation says of the same model."""
    assert not [name for name, kind in KINDS.items() if kind.judges and kind.evaluates]


def test_few_files_name_a_model_family() -> None:
    violations = [
        f"{file}:{line}: {family!r}; ask for a trait of Family"
        for file, line, family in named(FLOORS, FAMILIES)
        if file not in NAMES_A_FAMILY
    ]
    assert not violations, "\n".join(violations)


def test_an_exception_that_is_no_longer_needed_is_an_error() -> None:
    literals_by_file = {(file, kind) for file, _, kind in named(["pipeline"], KINDS)}
    exceptions = {(file, kind) for file, kinds in MEANS_NO_KIND.items() for kind in kinds}
    assert exceptions <= literals_by_file
    assert all((REPOSITORY / file).is_file() for file in NAMES_A_FAMILY)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ('if stage.kind == "gate":\n    pass', [1]),
        ('AUDITED = (\n    "sft",\n    "grpo",\n)', [2, 3]),
        ('def export():\n    """Write what sft trained."""\n    return f"sft {kind}"', []),
        ('group("gate", "override a gate")', []),
        ('@command("export", "write a model")\ndef export(): ...', []),
        ("if stage.declared.judges:\n    pass", []),
    ],
)
def test_a_name_is_found_where_it_means_a_kind(code: str, lines: list[int]) -> None:
    assert [line for line, _ in literals(ast.parse(code), KINDS)] == lines
