"""The registries of algorithms: the settings and the function of each, by its name in YAML.

An algorithm is one file: a settings class with a literal `name`, and its function under a decorator
of this module. Never imports torch.
"""

from __future__ import annotations

import importlib
import operator
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Discriminator, Field, Tag

from parallel.settings import Settings

AboveZero = Annotated[float, Field(gt=0)]
Function = TypeVar("Function", bound=Callable[..., Any])


class AlgorithmSettings(Settings):
    """The base of an algorithm's settings."""

    if TYPE_CHECKING:
        name: str

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each contradiction between these settings."""
        yield from ()


class AdvantageBase(AlgorithmSettings):
    """The base of an advantage's settings; the class variables say what it needs.

    `baseline`: what a response is compared with. `per_token`: the tokens of a response differ in
    advantage. `needs_step_rewards`: a reward has to score the steps of every response.
    """

    baseline: ClassVar[Literal["group", "batch", "critic"]] = "group"
    per_token: ClassVar[bool] = False
    needs_step_rewards: ClassVar[bool] = False

    @property
    def zero_variance_teaches(self) -> bool:
        """True where a group of equal rewards has advantages, from beyond the group."""
        return self.baseline != "group"

    @property
    def warmup_steps(self) -> int:
        """The first steps, in which the policy is not trained."""
        return 0


@dataclass(frozen=True)
class Algorithm:
    """A registered function, its settings class if it has keys, and its source.

    `description` and `formula` are the first paragraphs of the docstrings of settings and function.
    """

    function: Callable[..., Any]
    settings: type[Settings] | None
    source: str
    description: str
    formula: str


class Registry(dict[str, Algorithm]):
    """The algorithms that a YAML key such as `objective.ratio` chooses from, by name."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def register(
        self, name_or_settings: str | type[Settings], source: str = ""
    ) -> Callable[[Function], Function]:
        """Return a decorator that registers a function under a name, or that of its settings.

        Raises:
            ValueError: another function has the name.
        """
        settings = None if isinstance(name_or_settings, str) else name_or_settings
        name = (
            name_or_settings
            if isinstance(name_or_settings, str)
            else str(name_or_settings.model_fields["name"].default)
        )

        def add(function: Function) -> Function:
            if name in self:
                raise ValueError(f"{self.key}: {name} is registered twice; rename one of them")
            summaries = map(_summary, (settings or function, function))
            self[name] = Algorithm(function, settings, source, *summaries)
            return function

        return add

    def settings_union(self, default: str) -> Any:
        """Return the union of all settings classes, chosen by `name`, which may be left out."""

        def name_of(settings: Any) -> str:
            if isinstance(settings, dict):
                return str(settings.get("name", default))
            return str(getattr(settings, "name", default))

        # By name: the order of imports must not show in schemas and messages.
        arms = [
            Annotated[algorithm.settings, Tag(name)] for name, algorithm in sorted(self.items())
        ]
        return Annotated[reduce(operator.or_, arms), Discriminator(name_of)]


ADVANTAGES = Registry("objective.advantage")
RATIOS = Registry("objective.ratio")
AGGREGATIONS = Registry("objective.aggregation")
KL_ESTIMATORS = Registry("objective.kl.estimator")
CORRECTIONS = Registry("objective.correction")
PREFERENCES = Registry("stages.NAME.loss")
METHODS = Registry("stages.NAME.method")
WEIGHT_METHODS = Registry("stages.NAME.method of merge_weights")

advantage = ADVANTAGES.register
ratio = RATIOS.register
aggregation = AGGREGATIONS.register
kl_estimator = KL_ESTIMATORS.register
correction = CORRECTIONS.register
preference = PREFERENCES.register
method = METHODS.register
weight_method = WEIGHT_METHODS.register


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that its algorithms register themselves."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def _summary(documented: object) -> str:
    return (documented.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")
