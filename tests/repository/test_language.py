"""The repository's language: STYLE's words and docstrings, and a lint that finds what it must."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.structure import FLOORS, REPOSITORY

from tests.repository import language

MOST_VAGUE = 0.005  # of all assignments to names; a change may only lower it


def test_no_file_has_a_listed_word_or_an_unclear_docstring() -> None:
    found = [text for path in language.files() for text in language.findings(path)]
    assert not found, "\n".join(["reword (tests/repository/language.py lists by what):", *found])


def test_a_local_says_what_it_holds() -> None:
    names = [
        (f"{path.relative_to(REPOSITORY)}:{line}", name)
        for floor in FLOORS
        for path in sorted((REPOSITORY / floor).rglob("*.py"))
        for line, name in language.locals_of(path)
    ]
    vague = [f"{where}: {name}" for where, name in names if name in language.VAGUE_NAMES]
    assert len(vague) <= MOST_VAGUE * len(names), "\n".join(
        ["name these by what they hold:", *vague]
    )


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one file, `stages/page.py`."""
    monkeypatch.setattr(language, "REPOSITORY", tmp_path)
    (tmp_path / "stages").mkdir()
    return tmp_path / "stages" / "page.py"


@pytest.mark.parametrize("word", ["restarts anew", "many faults", "has been held to it", "Told so"])
def test_a_listed_word_is_found(planted: Path, word: str) -> None:
    planted.write_text(f"TEXT = 1\nOTHER = 'it {word}'\n")
    [found] = language.findings(planted)
    assert found.startswith("stages/page.py:2: ")


def test_every_binding_of_a_local_counts(planted: Path) -> None:
    planted.write_text(
        "SIZE = 1\nfor each in (found := []):\n    with each as own:\n"
        "        a.given = [part for part in b]\n"
    )
    names = sorted(name for _, name in language.locals_of(planted))
    assert names == ["each", "found", "own", "part"]


@pytest.mark.parametrize("text", ["a fork bomb, retold", "as many as 4", "default-folder", "kind"])
def test_an_ordinary_word_is_not_found(planted: Path, text: str) -> None:
    planted.write_text(f"TEXT = {text!r}\n")
    assert not list(language.findings(planted))


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ('"""What a page is."""', True),
        ('"""A page."""', False),
        ('class Page:\n    """Of a book."""', True),
        ('def page():\n    """The page."""', True),
        ('def page():\n    """Return the page."""', False),
        ('@property\ndef page():\n    """The page."""', False),
        ('def test_page():\n    """The page is white."""', False),
    ],
)
def test_a_docstring_begins_with_a_noun_or_a_verb(planted: Path, code: str, wrong: bool) -> None:
    planted.write_text(f"{code}\n")
    assert bool(list(language.findings(planted))) == wrong
