r"""Mathematical answers as math-verify reads them, and what it reads otherwise than people write.

Numbers are respelled before it reads a text (`1.6e-19`, `1\,250`, `5.`), and values that it finds
equal are compared again where it rounds them away: it compares floats to 6 decimals. Imports
math-verify and sympy inside functions, since `pipeline` reads the settings of rewards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")  # LaTeX that marks its mathematics
BOX = re.compile(r"\\(?:boxed|fbox)\b")
BOXED = re.compile(BOX.pattern + r"\s*\{")
# Between a digit and three others, or any where it is a thin space; LaTeX's spaces and Unicode's.
THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|\\!|\\thinspace\s?|[\u2009\u202f])(?=\d)")
GROUP = re.compile(r"(?<=\d)(?:~|\\[ ;:]|\u00a0)(?=\d{3}(?!\d))")
SPACED = re.compile(r"(?<=\{)\s*\d{1,3}(?: \d{3})+(?:\.\d+)?\s*(?=\})")  # alone within braces
FINAL_POINT = re.compile(r"(?<=\d)\.(?=\s*(?:\}|\$|\\\)|\\\]))")
SCIENTIFIC = re.compile(
    r"(?<![\w.\\])(?P<mantissa>\d+(?:\.\d*)?|\.\d+)[eE](?P<exponent>[+-]?\d{1,3})(?![\w.]\w)(?!\w)"
)
EULER = re.compile(r"\d+e-\d")  # 2e-1 is 0.2, or 2e - 1
SMALL = 1e-3  # of numbers below, 6 decimals are fewer than 4 digits
ROUNDED = 0.05  # relative difference of a number and its rounding
NEAR = 1.000001e-6  # relative error of a small number: 0.333333 of 1/3, at its scale


def spelled(text: str) -> list[str]:
    r"""Return the texts that a text may be: its numbers are written plainly.

    `1.6e-19` is a number, digits are not grouped, and no point ends a number. A text with `2e-1` is
    returned as written too, where `e` may be Euler's number.

    Example:
        >>> spelled(r"1\,250 and 1.6e-3"), spelled("2e-1")
        (['1250 and 0.0016'], ['0.2', '2e-1'])
    """
    text = BOXED.sub(r"\\boxed{", text)
    for pattern in (THIN_SPACE, GROUP, FINAL_POINT):
        text = pattern.sub("", text)
    text = SPACED.sub(lambda match: match[0].replace(" ", ""), text)
    plain = SCIENTIFIC.sub(lambda match: format(Decimal(match[0]), "f"), text)
    ambiguous = any(EULER.fullmatch(match[0]) for match in SCIENTIFIC.finditer(text))
    return [plain, text] if ambiguous else [plain]


def read(text: str) -> list[list[Any]]:
    """Return each reading of a text's last answer by math-verify: an expression, and its text.

    A reading without an answer is left out.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    any_form = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    readings = (
        parse(spelling, extraction_config=any_form, parsing_timeout=None)
        for spelling in spelled(text)
    )
    return [reading for reading in readings if reading]


def boxes(text: str) -> str:
    r"""Return the text from the first closed `\boxed{...}` to the end of the last.

    Return "" where the text's last box is not closed, or has no content.

    Example:
        >>> boxes(r"so it is \boxed{4}."), boxes(r"\boxed{4} or \boxed{5")
        ('\\boxed{4}', '')
    """
    starts = {match.end() - 1: match.start() for match in BOXED.finditer(text)}  # by their brace
    if not starts or BOX.search(text, max(starts)):
        return ""
    open_braces: list[int] = []
    ends: dict[int, int] = {}
    for place in range(min(starts), len(text)):
        if text[place] == "{" and text[place - 1] != "\\":
            open_braces.append(place)
        elif text[place] == "}" and text[place - 1] != "\\" and open_braces:
            ends[open_braces.pop()] = place + 1
    closed = [brace for brace in starts if brace in ends]
    last = max(starts)
    if last not in ends or not text[last + 1 : ends[last] - 1].strip():
        return ""
    return text[starts[closed[0]] : max(ends[brace] for brace in closed)]


def equal(expected: list[Any], answer: list[Any]) -> bool:
    """Return whether two readings are equal: to math-verify, and their small numbers to 6 digits.

    An answer that is a false equation of numbers, as `6 = 7`, equals nothing; math-verify would
    take its last side.

    Example: the readings of 1/2 and 0.5 are equal, and those of 1/3 and 0.33 are not. Of small
    numbers 0.0001 equals 1/10000 and not 0.00010001, which math-verify rounds to it.
    """
    from math_verify import verify
    from sympy import Basic, UnevaluatedExpr

    if is_false_equation(answer[0]) or not verify(expected, answer, timeout_seconds=None):
        return False
    expressions = (expected[0], answer[0])
    if any(isinstance(side, Basic) and side.has(UnevaluatedExpr) for side in expressions):
        return True  # a percentage, which is two numbers: 7 % equals 7 and 0.07
    values, answers = (list(numbers(side)) for side in expressions)
    return _have_near(values, answers) and _have_near(answers, values)


def is_false_equation(expression: Any) -> bool:
    """Return whether an expression is an equation of two numbers that differ, or a chain with one.

    Sides that differ by ROUNDED at most may be rounded, as in `2/3 = 0.67`.
    """
    for equation in _chain(expression):
        if equation.lhs.is_number and equation.rhs.is_number:
            left, right = equation.lhs.evalf(20), equation.rhs.evalf(20)
            if not abs(left - right) <= ROUNDED * max(abs(left), abs(right)):
                return True
    return False


def numbers(expression: Any) -> Iterator[Any]:
    """Yield the numbers that an expression consists of: itself, a set's or a tuple's.

    Each is sympy's, of 20 digits. An equation's is its last side's.
    """
    from sympy import Basic, Expr, MatrixBase

    if isinstance(expression, MatrixBase):
        for entry in expression.flat():
            yield from numbers(entry)
    elif chain := _chain(expression):
        # sympy sorts them: the last side begins no other equation.
        left_sides = {equation.lhs for equation in chain}
        for equation in chain:
            if equation.rhs not in left_sides:
                yield from numbers(equation.rhs)
    elif isinstance(expression, Expr):
        if expression.is_number and (value := expression.evalf(20)).is_finite:
            yield value
    elif isinstance(expression, Basic):
        for argument in expression.args:
            yield from numbers(argument)


def _chain(expression: Any) -> tuple[Any, ...]:
    """Return the equations of a chain, as a = b = c; of another expression none."""
    from sympy import And, Equality

    equations = expression.args if isinstance(expression, And) else (expression,)
    return equations if all(isinstance(equation, Equality) for equation in equations) else ()


def _have_near(values: list[Any], candidates: list[Any]) -> bool:
    """Return whether each small value has another one near it."""
    small = [value for value in values if 0 < abs(value) < SMALL]
    return all(
        any(abs(value - near) <= NEAR * abs(value) for near in candidates) for value in small
    )
