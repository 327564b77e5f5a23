"""Every file that is written or locked goes through parallel/files.py, which follows no link."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from tools.structure import REPOSITORY

from tests.repository.test_architecture import modules

HELPERS = "parallel/files.py"
METHODS = {"write_text", "write_bytes", "touch"}
OPENERS = {"open", "FileIO"}
COPIES = {"copy", "copy2", "copyfile", "copytree"}
ALLOWED = {  # how many calls, and why
    "pipeline/cli.py": (1, "os.devnull"),
    "pipeline/text.py": (1, "os.devnull"),
    "pipeline/run/bundle/writer.py": (1, "an archive in a directory that `unfinished` has checked"),
    "pipeline/run/bundle/inputs.py": (2, "copies into the new directory of a bundle there"),
    "pipeline/run/select.py": (2, "copies into a new directory of this user's run"),
    "parallel/weights/mapping.py": (1, "memory of another process, by its descriptor in /proc"),
    "stages/rewards/containment/examiner.py": (1, "a pipe, inside the sandbox"),
    "stages/rewards/containment/jail.py": (2, "inside the sandbox, and /proc"),
    "stages/rewards/containment/supervisor.py": (1, "/proc and control groups"),
}


def writes(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls that may write to a path and follow a link there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        named = {each.arg: each.value for each in node.keywords}
        values = [*node.args, *(named[each] for each in ("mode", "flags") if each in named)]
        if (of and name in METHODS) or (of == "shutil" and name in COPIES):
            yield node
        elif of == "os" and name == "open":
            flags = " ".join(map(ast.unparse, values[1:]))
            if any(flag in flags for flag in ("WRONLY", "RDWR", "CREAT")) and "EXCL" not in flags:
                yield node
        elif name in OPENERS and any(map(_is_writing_mode, values)):
            yield node


def _is_writing_mode(value: ast.expr) -> bool:
    """Return whether an argument is a mode that writes; "x" creates and so follows no link."""
    texts = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
    modes = [text for text in texts if isinstance(text, str) and len(text) <= 5]
    return any(set(mode[:1]) & set("wa") or (mode[:1] == "r" and "+" in mode) for mode in modes)


def test_no_other_module_opens_a_file_to_write_it() -> None:
    found: dict[str, list[str]] = {}
    for floor in ("pipeline", "stages", "parallel"):
        for path, tree in modules(floor):
            name = str(path.relative_to(REPOSITORY))
            if name != HELPERS and (calls := [*writes(tree)]):
                found[name] = [f"{name}:{call.lineno}: {ast.unparse(call)}" for call in calls]
    allowed = {name: count for name, (count, _) in ALLOWED.items()}
    wrong = [text for name, texts in found.items() for text in texts if name not in allowed]
    assert not wrong, "\n".join(["use replacing, open_in_place, open_lock or touch:", *wrong])
    assert {name: len(texts) for name, texts in found.items()} == allowed


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("path.open('w')", True),
        ("path.open('ab', buffering=0)", True),
        ("path.open(mode='r+b')", True),
        ("path.open('r+b' if path.exists() else 'w+b')", True),
        ("open(path, 'a+b')", True),
        ("tarfile.open(path, 'w:gz')", True),
        ("FileIO(path, 'a')", True),
        ("path.write_text(text)", True),
        ("path.touch()", True),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", True),
        ("shutil.copyfile(source, path)", True),
        ("path.open('x')", False),
        ("path.open('rb')", False),
        ("path.open()", False),
        ("os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)", False),
        ("open_in_place(path, 'ab')", False),
    ],
)
def test_the_lint_finds_what_follows_a_link(line: str, counts: bool) -> None:
    assert len([*writes(ast.parse(line))]) == counts
