"""Readers of answers in place of `eval` and sympy's `parse_expr`, which would run them as code.

A scorer that runs a response's text hands its process, and the score itself, to whoever wrote the
text: even in a sandbox it could print any score. So the text is never run. Literals and
expressions of elementary functions are read, anything else is an error, as is a number so large
that computing it would take the memory. What is still slow, such as simplifying, ends with the
reward's process at its time limit.
"""

from __future__ import annotations

import ast
import math
import re
from fractions import Fraction
from typing import Any

LONGEST = 20_000  # characters of an answer: a board of 100 x 100 as a list of lists
LONGEST_EXPRESSION = 2000
MOST_BITS = 4096.0  # of a number in an expression
MOST_EXPONENT = 308  # of a literal: Python reads 1e-999 as 0, sympy reads all its digits
EXPONENT = re.compile(r"(?<=[\d._])[eE][+-]?([\d_]+)")
FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc"),
    *("sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "erf"),
}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
EXPONENTIALS = ("exp", "sinh", "cosh")


def read_literal(text: str) -> Any:
    """Return the value of a Python literal: numbers, texts, lists, tuples, sets and dicts of these.

    Raises ValueError or SyntaxError for other text.
    """
    if not isinstance(text, str) or len(text) > LONGEST:
        raise ValueError(f"not a literal of at most {LONGEST} characters")
    return ast.literal_eval(text)


def read_expression(text: str, local_dict: dict[str, Any] | None = None) -> Any:
    """Return sympy's expression of a text of numbers, symbols, + - * / ** and FUNCTIONS.

    `local_dict` has the meaning of symbols, as for sympy's parse_expr. Raises ValueError or
    SyntaxError for other text.
    """
    from sympy import parse_expr

    if not isinstance(text, str) or len(text) > LONGEST_EXPRESSION:
        raise ValueError(f"not an expression of at most {LONGEST_EXPRESSION} characters")
    # On the text: `ast.parse` reads 1e-999 as 0, and sympy would read it with all its digits.
    if any(int(digits.replace("_", "") or 0) > MOST_EXPONENT for digits in EXPONENT.findall(text)):
        raise ValueError(f"a number with an exponent above {MOST_EXPONENT}")
    _bits(ast.parse(text.strip(), mode="eval").body)
    return parse_expr(text, local_dict=local_dict)


def _bits(node: ast.expr) -> tuple[float, float]:
    """Return bounds on the base-2 logarithms of a number's numerator and denominator.

    They bound the number and its inverse too. Symbols count as 2. Raises ValueError for anything
    but numbers, symbols, arithmetic and FUNCTIONS, and above MOST_BITS.
    """
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            exact = Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
            above, below = math.log2(abs(exact.numerator) + 1), math.log2(exact.denominator)
        case ast.Name(id=name) if not name.startswith("_") and name.isascii():
            above, below = 1.0, 0.0
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            above, below = _bits(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            # 2^64 bits are above every bound, and a larger power would overflow the float.
            above = below = max(*_bits(left), 1.0) * 2 ** min(_bits(right)[0], 64.0)
        case ast.BinOp(left=left, op=operator, right=right) if isinstance(operator, ARITHMETIC):
            above, below = _combined(operator, _bits(left), _bits(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            bits = _bits(argument)
            above = below = 2 ** min(bits[0], 64.0) if name in EXPONENTIALS else max(bits)
        case _:
            raise ValueError(f"no part of an expression: {ast.unparse(node)[:60]}")
    if not max(above, below) <= MOST_BITS:
        raise ValueError(f"a number of more than {MOST_BITS:.0f} bits: {ast.unparse(node)[:60]}")
    return above, below


def _combined(
    operator: ast.operator, left: tuple[float, float], right: tuple[float, float]
) -> tuple[float, float]:
    """Return the bounds of `_bits` for one of the operators ARITHMETIC on two numbers."""
    if isinstance(operator, ast.Mult):
        return left[0] + right[0], left[1] + right[1]
    if isinstance(operator, ast.Div):
        return left[0] + right[1], left[1] + right[0]
    return max(left[0] + right[1], right[0] + left[1]) + 1, left[1] + right[1]
