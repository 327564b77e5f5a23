"""Problems from reasoning-gym (arXiv 2505.24760), scored by reasoning-gym's own scorers.

Importing reasoning_gym takes seconds, so only code that creates or scores problems imports it.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.data.formats import FORMATS, Entry
from stages.data.problem import DomainError, Problem
from stages.data.reasoning_gym_options import SET_BY_THE_STREAM, value_violation
from stages.data.sources.settings import ReasoningGymPromptSettings

UNBOUNDED = 2**62
PATIENCE = 20_000
EVALUATORS = {"eval", "exec", "parse_expr", "sympify"}  # sympy's call eval


class ReasoningGymSource:
    """An endless sequence of problems, each a pure function of the seed and its index.

    reasoning-gym draws item i with Random(seed + i): two seeds closer than the number of items
    drawn from them share items.
    Raises DomainError where the dataset or a key of its config is unknown or invalid, or where the
    dataset's scorer would execute a response's text.
    """

    key = "prompts.config"
    patience = PATIENCE

    def __init__(self, settings: ReasoningGymPromptSettings, domain: str, seed: int) -> None:
        self._domain = domain
        self._name = settings.dataset
        self._dataset = _create_dataset(settings, domain, seed)

    def problem(self, index: int) -> Problem:
        """Return the problem at `index`. Raises DomainError where the dataset cannot draw one."""
        try:
            entry: Entry = self._dataset[index]
        except Exception as error:
            raise DomainError(
                self._domain,
                "prompts.config",
                f"no prompts: reasoning-gym's {self._name} cannot draw a problem ({error})",
            ) from error
        form = FORMATS[self._name]
        return Problem(
            domain=self._domain,
            index=index,
            prompt=form.prompt(entry),
            answer=form.answer(entry),
            fields={"dataset": self._name, "entry": entry},
        )


def score(problem: Problem, answer: str) -> float:
    """Return reasoning-gym's score of `answer`, in [0, 1]; 0 for an invalid answer.

    reasoning-gym's number_sorting tolerates an error of 1 in each number.
    Raises ValueError for a problem of another source, which has no such scorer.
    """
    dataset = problem.fields.get("dataset")
    if dataset not in FORMATS:
        raise ValueError("only problems of source reasoning_gym have reasoning-gym's scorer")
    handed_in = FORMATS[dataset].hand_in(answer)
    if handed_in is None:
        return 0.0
    return float(_scorer(dataset)(handed_in, problem.fields["entry"]))


@cache
def _scorer(dataset: str) -> Callable[[str, Entry], float]:
    return _reasoning_gym().get_score_answer_fn(dataset)


def _create_dataset(settings: ReasoningGymPromptSettings, domain: str, seed: int) -> Any:
    name = settings.dataset
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise DomainError(domain, "prompts.dataset", f"unknown dataset {name!r}; known are {known}")
    dataset_type, config_type = _reasoning_gym().factory.DATASETS[name]
    if found := _evaluation(dataset_type):
        raise DomainError(
            domain,
            "prompts.dataset",
            f"reasoning-gym's scorer would run a response's text: {found}; read the problems from"
            " a file and score them with your own reward",
        )
    kinds = {
        option.name: getattr(option.type, "__name__", str(option.type))
        for option in fields(config_type)
    }
    options = sorted(set(kinds) - SET_BY_THE_STREAM)
    for key, value in settings.config.items():
        if key not in options:
            message = f"{name} has no such option; it has {', '.join(options)}"
            raise DomainError(domain, f"prompts.config.{key}", message)
        if wrong := value_violation(kinds[key], value):
            raise DomainError(domain, f"prompts.config.{key}", wrong)
    try:
        return _reasoning_gym().create_dataset(name, seed=seed, size=UNBOUNDED, **settings.config)
    except Exception as error:  # its configs reject values by assertions and other errors
        raise DomainError(domain, "prompts.config", f"rejected by {name}: {error}") from error


def _evaluation(dataset_type: type[Any]) -> str | None:
    """Return where the module of a dataset's scorer evaluates text as code, or None.

    An entry alone is reasoning-gym's own text; anything else may be a response.
    """
    module = sys.modules[dataset_type.score_answer.__module__]
    path = Path(str(module.__file__))
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func)
        names = {each.id for each in ast.walk(node.args[0]) if isinstance(each, ast.Name)}
        if called.rpartition(".")[2] in EVALUATORS and names != {"entry"}:
            return f"{path.name}:{node.lineno} calls {ast.unparse(node)}"
    return None


def _reasoning_gym() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib compares with `is`
        import reasoning_gym

    return reasoning_gym
