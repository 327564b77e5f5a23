"""Calls in a scorer's source that evaluate a response's text as code.

Found by following the answer through `score_answer` and the functions and methods of its package
that it is handed to; statements are read in no order, so that nothing which might be the answer is
missed. An entry alone is the dataset's own text. Nothing that is read is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stages.data.reasoning_gym import SCORER

ANSWER = "answer"
# sympy's call eval: also each of its functions that is handed text instead of an expression.
EVALUATORS = {
    *("eval", "exec", "compile", "parse_expr", "sympify", "parse_latex", "lambdify", "S"),
    *("__import__", "import_module", "system", "popen", "Popen"),
}
Function = ast.FunctionDef


@dataclass(frozen=True)
class AnswerEvaluation:
    """A call that evaluates the answer, `function` as it is written, in a `scorer` or below it."""

    line: int
    function: str
    call: str
    in_scorer: bool


@cache
def evaluations(path: Path, dataset_class: str) -> tuple[AnswerEvaluation, ...]:
    """Return the calls by which a dataset's scorer evaluates an answer; none where it inherits it.

    Raises OSError or SyntaxError where the module cannot be read.
    """
    functions = dict(_functions(path, set()))
    classes = [each for each in _parsed(path).body if isinstance(each, ast.ClassDef)]
    own = [each for each in classes if each.name == dataset_class]
    methods = {name: each for block in own for name, each in _defined(block)}
    functions |= methods  # which hide others of the same name
    if SCORER not in methods:
        return ()
    found: dict[int, AnswerEvaluation] = {}
    waiting, seen = [(SCORER, frozenset({ANSWER}))], set[tuple[str, frozenset[str]]]()
    while waiting:
        task = waiting.pop()
        if task in seen:
            continue
        seen.add(task)
        name, given = task
        texts = _texts(functions[name], set(given))
        for call in ast.walk(functions[name]):
            if not isinstance(call, ast.Call):
                continue
            called = ast.unparse(call.func)
            last = called.rpartition(".")[2]
            own_parser = last in functions and last == called
            if (
                last in EVALUATORS
                and not own_parser
                and any(_mentions(each, texts) for each in _values(call))
            ):
                at = AnswerEvaluation(call.lineno, called, ast.unparse(call), name == SCORER)
                found[call.lineno] = at
            elif last in functions:
                waiting.append((last, frozenset(_handed(functions[last], call, texts))))
    return tuple(found[line] for line in sorted(found))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def _defined(tree: ast.AST) -> Iterator[tuple[str, Function]]:
    for each in ast.walk(tree):
        if isinstance(each, Function):
            yield each.name, each


def _functions(path: Path, seen: set[Path]) -> Iterator[tuple[str, Function]]:
    """Yield the functions and methods of a module by name, after those of its package's others.

    Imports of other packages are not followed.
    """
    seen.add(path)
    for each in ast.walk(_parsed(path)):
        if not isinstance(each, ast.ImportFrom):
            continue
        first, *rest = (each.module or "").split(".")
        roots = [parent for parent in path.parents if parent.name == first]
        if each.level:
            base = path.parents[each.level - 1].joinpath(first, *rest)
        elif roots:
            base = roots[0].joinpath(*rest)
        else:
            continue
        for file in (base.with_suffix(".py"), *(base / f"{name.name}.py" for name in each.names)):
            if file.is_file() and file not in seen:
                yield from _functions(file, seen)
    yield from _defined(_parsed(path))


def _texts(function: Function, given: set[str]) -> set[str]:
    """Return the names in a function that may hold the text `given`, or something made of it."""
    found, before = set(given), -1
    while len(found) > before:
        before = len(found)
        for node in ast.walk(function):
            for target, value in _assigned(node):
                if _mentions(value, found):
                    names = (each for each in ast.walk(target) if isinstance(each, ast.Name))
                    found |= {each.id for each in names}
    return found


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the targets that a node assigns to, each with the value."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr


def _handed(function: Function, call: ast.Call, texts: set[str]) -> set[str]:
    """Return the parameters of a function that a call hands such a text to."""
    parameters = [each.arg for each in function.args.args]
    if parameters[:1] in (["self"], ["cls"]):
        parameters = parameters[1:]
    values: list[tuple[str | None, ast.AST]] = [
        (parameters[place] if place < len(parameters) else None, value)
        for place, value in enumerate(call.args)
    ]
    values += [(each.arg, each.value) for each in call.keywords]
    handed = [name for name, value in values if _mentions(value, texts)]
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    return set(parameters) if handed and (None in handed or starred) else {n for n in handed if n}


def _values(call: ast.Call) -> list[ast.AST]:
    return [*call.args, *(each.value for each in call.keywords)]


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))
