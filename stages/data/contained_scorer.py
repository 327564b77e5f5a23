"""Scorers of reasoning-gym that evaluate a response's text, with readers in place of that.

Never imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from stages.data.answer_readers import read_expression, read_literal
from stages.data.reasoning_gym_options import version_violation

SCORER = "score_answer"
READERS: dict[str, Callable[..., Any]] = {"eval": read_literal, "parse_expr": read_expression}
# What a dataset's scorer calls on a response's text, as its module names it. All other scorers of
# the pinned version only compare the text. tests/stages/scorer_source.py follows the answer through
# the source of the installed package, and a test compares what it finds.
EVALUATORS = {
    "binary_matrix": "eval",
    "countdown": "parse_expr",
    "intermediate_integration": "sympy.parse_expr",
    "n_queens": "eval",
    "polynomial_multiplication": "sp.parse_expr",
    "puzzle24": "parse_expr",
    "simple_integration": "sympy.parse_expr",
    "spiral_matrix": "eval",
    "string_insertion": "eval",
}


def contained(dataset: str, instance: Any) -> Callable[[str, Any], float]:
    """Return the scorer of a dataset's `instance`, in which a reader stands for the evaluator.

    Raises ValueError for another version of reasoning-gym than EVALUATORS is of.
    """
    if why := version_violation():
        raise ValueError(why)
    scorer: FunctionType = getattr(type(instance), SCORER)
    if (evaluator := EVALUATORS.get(dataset)) is None:
        return getattr(instance, SCORER)
    module = sys.modules[scorer.__module__].__dict__
    library, _, function = evaluator.rpartition(".")
    replaced: dict[str, Any] = {function: READERS[function]}
    if library:  # as sympy.parse_expr
        replaced = {library: SimpleNamespace(**{**vars(module[library]), **replaced})}
    # A copy with other globals: the package's own module stays as it is.
    copy = FunctionType(
        scorer.__code__,
        {**module, **replaced},
        scorer.__name__,
        scorer.__defaults__,
        scorer.__closure__,
    )
    return copy.__get__(instance)
