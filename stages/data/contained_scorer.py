"""Scorers of reasoning-gym that evaluate a response's text, with readers in place of that.

Never imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from stages.data.answer_readers import read_expression, read_literal
from stages.data.reasoning_gym_options import registered
from stages.data.scorer_source import SCORER, AnswerEvaluation, evaluations

READERS: dict[str, Callable[..., Any]] = {"eval": read_literal, "parse_expr": read_expression}


def scorer_violation(dataset: str) -> str | None:
    """Return why a dataset's scorer may not be run on a response, or None.

    It evaluates the text in a way, or in a place, for which there is no reader.
    """
    found = registered().get(dataset)
    for each in _evaluations(dataset):
        if found and (_reader(each) is None or not each.in_scorer):
            return (
                f"{dataset}'s scorer would run a response's text as code: {found.path.name}:"
                f"{each.line} calls {each.call}; read the problems from a file and score them with"
                " your own reward (docs/how-to/reward.md)"
            )
    return None


def contained(dataset: str, instance: Any) -> Callable[[str, Any], float]:
    """Return the scorer of a dataset's `instance`, in which readers stand for evaluators.

    Raises ValueError where `scorer_violation` finds one.
    """
    if why := scorer_violation(dataset):
        raise ValueError(why)
    scorer: FunctionType = getattr(type(instance), SCORER)
    if not (found := _evaluations(dataset)):
        return getattr(instance, SCORER)
    # A copy with other globals: the package's own module stays as it is.
    module = sys.modules[scorer.__module__].__dict__
    changed: dict[str, Any] = {}
    for each in found:
        first, _, last = each.function.rpartition(".")
        if first:  # as sympy.parse_expr
            own = SimpleNamespace(**{**vars(module[first]), last: READERS[last]})
            changed[first] = own
        else:
            changed[last] = READERS[last]
    copy = FunctionType(
        scorer.__code__,
        {**module, **changed},
        scorer.__name__,
        scorer.__defaults__,
        scorer.__closure__,
    )
    return copy.__get__(instance)


def _evaluations(dataset: str) -> tuple[AnswerEvaluation, ...]:
    """Return the evaluations in a dataset's scorer; none where reasoning-gym is not installed."""
    if (found := registered().get(dataset)) is None:
        return ()
    return evaluations(found.path, found.dataset_class)


def _reader(each: AnswerEvaluation) -> Callable[..., Any] | None:
    """Return what reads the text in an evaluator's place; `eval` is only the builtin."""
    first, _, last = each.function.rpartition(".")
    return None if "." in first or (first and last == "eval") else READERS.get(last)
