"""A lint of the repository's language: words that nobody greps for, and docstrings' first words.

`python -m tests.repository.language [PATH ...]` lists the findings in these files, or in all files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# A word of the left is a finding; the right says what the field says instead.
WORDS = {
    r"anew": "again, restart, rerun",
    r"mend(s|ed|ing)?": "fix",
    r"told": "report, print, say",
    r"h[eo]ld(s|ing)? (it |them )?(to|against)": "check, compare with",
    r"lay(s|ing)? over|laid over": "override",
    r"so many": "N",
    r"as many(?! as)": "N",
    r"thereof": "name the noun",
    r"whose turn": "next",
    r"takes? along": "block",
    r"under way": "in flight, running",
    r"bears?": "allow",
    r"in peace": "uninterrupted",
    r"kin": "name the noun",
    r"side by side|side-by-side": "in parallel",
    r"go(es)? on": "continue",
    r"made from": "its inputs are",
    r"lies": "is",
    r"has \w+ done": "finished",
    r"what there is": "name the noun",
    r"what it was": "name the noun",
    r"(one|that|those|none|some) of (its|their) own": "name the noun",
}
# Tests inject faults, and a benchmark's folder is nobody's reading.
PRODUCT_WORDS = {r"faults?": "error", r"folders?": "directory"}
READ = (".py", ".md", ".yaml", ".sbatch", ".sh", ".toml", ".cfg")
EXEMPT = {"tests/repository/language.py", "tests/repository/test_language.py", "CHANGELOG.md"}

# A local of such a name does not say what it holds. They were 13 % of all; in peers .1 to .9 %.
VAGUE = "each found own part parts given known named chosen kept first rest others said made wanted"
VAGUE_NAMES = {*VAGUE.split(), "asked", "drawn", "begun", "owed", "behind", "useless"}

NOUN_CLAUSES = ("What", "Whether", "How", "Of", "That", "Those", "Its", "Where", "Which", "Why")
NO_VERBS = (*NOUN_CLAUSES, "The", "A", "An", "Every", "Everything", "Each", "All", "One", "This")
NO_VERBS = (*NO_VERBS, "These", "Two", "Three", "From", "As", "No", "Nothing", "Bytes", "Against")


def files() -> list[Path]:
    """Return the repository's files of text that a person wrote."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    paths = [REPOSITORY / name for name in listed.stdout.splitlines() if name.endswith(READ)]
    return [path for path in paths if path.exists() and _relative(path) not in EXEMPT]


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of every finding of the word list in a file."""
    product = not _relative(path).startswith(("tests/", "benchmarks/", "requirements/"))
    listed = WORDS | PRODUCT_WORDS if product else WORDS
    pattern = re.compile(rf"(?<![\w-])({'|'.join(listed)})(?![\w-])", re.IGNORECASE)
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        for found in pattern.finditer(line):
            yield number, found[0]


def locals_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every assignment to a name: of loops and `with` as well.

    Constants do not count, nor do attributes and parameters.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not node.id.isupper():
            yield node.lineno, node.id


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the first words of docstrings that begin with a noun clause.

    A function's has to begin with a verb in the imperative: with no word of `NO_VERBS`.
    Properties and fixtures are what they return, and tests are statements.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        text = ast.get_docstring(node) or ""
        function = not isinstance(node, ast.ClassDef | ast.Module) and not _is_noun(node)
        first = re.split(r"\W", text, maxsplit=1)[0]
        if first in (NO_VERBS if function else NOUN_CLAUSES) or text.startswith("The same"):
            yield getattr(node, "lineno", 1), " ".join(text.split()[:6])


def _is_noun(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if node.name.startswith("test_"):
        return True
    names = " ".join(ast.unparse(each) for each in node.decorator_list)
    return any(name in names for name in ("property", "fixture"))


def findings(path: Path) -> Iterator[str]:
    """Yield every finding in a file as `PATH:LINE: TEXT`."""
    where = _relative(path)
    for number, word in words(path):
        yield f"{where}:{number}: {word!r}"
    if path.suffix == ".py" and not where.startswith("benchmarks/"):
        for number, text in docstrings(path):
            yield f"{where}:{number}: docstring begins {text!r}"


def _relative(path: Path) -> str:
    return str(path.resolve().relative_to(REPOSITORY))


if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]]
    found = [
        text
        for path in files()
        if not chosen or any(path == each or each in path.parents for each in chosen)
        for text in findings(path)
    ]
    print(*found, sep="\n")
    sys.exit(bool(found))
