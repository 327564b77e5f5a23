"""The shell commands that README, CONTRIBUTING, docs, the Makefile and docstrings name."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.runs import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
PAGES += [
    page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if "reference" not in page.parts
]
PYTHONS = {"python", "python3.12", ".venv/bin/python", ".venv-trl/bin/python"}
BRAIDS = {"braid", ".venv-gpu/bin/braid"}
# Of other projects: shown, not checked.
OTHERS = {"cp", "tail", "wandb", "tensorboard", "sbatch", "source"}


class DocumentedCommand(NamedTuple):
    """A command, without the variables before it and the comment behind it."""

    where: str  # the file that names it
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


def of_pages() -> Iterator[DocumentedCommand]:
    """Yield the commands of all pages' blocks of code.

    A block whose first word is a program has commands alone: one of a program that no list above
    names is an error of its page.
    """
    for page in PAGES:
        for language, text in re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.S):
            if language not in ("", "bash", "sh"):
                continue
            if language or _is_command(text):
                yield from (DocumentedCommand(page.name, words) for words in _commands(text))


def of_makefile() -> Iterator[DocumentedCommand]:
    """Yield the Makefile's commands of Python, with the variables of Make as they are."""
    for line in _lines((REPOSITORY / "Makefile").read_text()):
        recipe = line.partition("  # ")[0]
        if found := re.search(
            r"\$\(\w*(?:BIN|PYTHON)\)(?:/bin)?(?:/python)? ((?:-W \w+ )?(?:-m )?[\w./]+.*)", recipe
        ):
            arguments = re.sub(r"\$\((?:[^()]|\([^()]*\))*\)", "", found[1])
            yield DocumentedCommand("Makefile", ("python", *arguments.replace('"', "").split()))


def of_docstrings() -> Iterator[DocumentedCommand]:
    """Yield the indented commands of the docstrings of benchmarks, tools and tests."""
    for folder in ("benchmarks", "tools", "tests"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            for line in re.findall(r"^    (\S*python\S* .*)$", text, re.M):
                yield DocumentedCommand(str(path.relative_to(REPOSITORY)), _words(line))


def _is_command(text: str) -> bool:
    """Return whether a block begins with a program, of this machine at least."""
    word = re.sub(r"^(#.*\n|[A-Z_]+=\S* )*", "", text.lstrip()).split(maxsplit=1)[0]
    return word in PYTHONS | BRAIDS | OTHERS | {"make"} or _is_program(word)


def _is_program(word: str) -> bool:
    """Return whether a word is a program of this machine, and not the begin of a printed line."""
    return bool(re.fullmatch(r"[a-z][\w.-]*", word)) and shutil.which(word) is not None


def _lines(text: str) -> list[str]:
    return re.sub(r"\\\n\s*", " ", text).splitlines()


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command; a quotation may go over several lines."""
    pending = ""
    for line in _lines(text):
        pending += f"{line}\n"
        try:
            words = _words(pending)
        except ValueError:
            continue
        pending = ""
        if words:
            yield words
    if pending:
        raise ValueError(f"a quotation is not closed: {pending}")


def _words(line: str) -> tuple[str, ...]:
    words = shlex.split(line.strip(), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return tuple(words)


def source_of(words: tuple[str, ...]) -> Path | None:
    """Return the file that a command of Python runs; None where it is not of this repository."""
    arguments = [word for word in words[1:] if word not in ("-W", "ignore")]
    if arguments[0] != "-m":
        return REPOSITORY / arguments[0]
    path = REPOSITORY.joinpath(*arguments[1].split("."))
    if not (REPOSITORY / arguments[1].partition(".")[0]).is_dir():
        return None
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
