"""The mistakes of `make mutants` can still be made, and name tests of `make test`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import MUTANTS
from tests.mutants.mutant import Mutant, StaleMutant
from tests.runs import REPOSITORY


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_code_that_is_there(mutant: Mutant) -> None:
    changed = mutant.applied(REPOSITORY)
    assert changed != (REPOSITORY / mutant.file).read_text()
    ast.parse(changed)
    for path, _, test in (each.partition("::") for each in mutant.tests.split()):
        assert (REPOSITORY / path).exists()
        assert not test or f"def {test}(" in (REPOSITORY / path).read_text()


def test_a_mutant_of_other_code_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, count in (("x = 1", 2), ("y", 0)):
        with pytest.raises(StaleMutant, match=rf"one: a\.py has '{old}' {count} times"):
            Mutant("one", "a.py", old, "z", "tests").applied(tmp_path)


def test_names_are_of_one_mutant_each() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
