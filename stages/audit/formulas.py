"""The registries of the audit's formulas, by the names that an objective has in YAML.

An objective works without a formula here: a stage that trains with it is reported as not audited.
The formulas stand apart from `stages.objectives`, whose registries this room may not import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stages.audit.recorded import NotAuditable

Formula = TypeVar("Formula", bound=Callable[..., Any])


class Formulas(dict[str, Callable[..., Any]]):
    """The audit's formulas of one key of an objective, which stand in one module.

    Example:
        >>> ratios = Formulas("ratio", "stages/audit/objective.py")
        >>> double = ratios.register("double", "twice")(lambda value: 2 * value)
        >>> ratios.find("twice")(3)
        6
    """

    def __init__(self, key: str, path: str) -> None:
        super().__init__()
        self.key, self.path = key, path

    def register(self, *names: str) -> Callable[[Formula], Formula]:
        """Return a decorator that registers a formula under the names of its algorithms.

        Raises:
            ValueError: another formula has one of the names.
        """

        def add(formula: Formula) -> Formula:
            for name in names:
                if name in self:
                    raise ValueError(f"{self.path}: {self.key} {name} is registered twice")
                self[name] = formula
            return formula

        return add

    def find(self, name: str) -> Callable[..., Any]:
        """Return the formula of an algorithm.

        Raises:
            NotAuditable: there is none.
        """
        if name not in self:
            raise NotAuditable(
                f"no formula for {self.key} {name!r} in {self.path}; add one beside"
                f" {next(iter(self))!r}"
            )
        return self[name]


ADVANTAGES = Formulas("advantage", "stages/audit/advantages.py")
RATIOS = Formulas("ratio", "stages/audit/objective.py")
CORRECTIONS = Formulas("correction", "stages/audit/objective.py")
KL_ESTIMATORS = Formulas("kl.estimator", "stages/audit/objective.py")
AGGREGATIONS = Formulas("aggregation", "stages/audit/objective.py")
