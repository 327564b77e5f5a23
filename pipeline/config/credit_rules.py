"""Rules between what every token of a response is credited with, and its ratio."""

from __future__ import annotations

from collections.abc import Iterator

from stages.objectives.settings import ObjectiveSettings

Found = Iterator[tuple[str, str]]

OF_EACH_TOKEN = ("process", "gae")  # advantages
OF_A_RESPONSE = ("sequence", "geometric", "rspo")  # ratios


def credit_rules(key: str, objective: ObjectiveSettings) -> Found:
    """Every broken rule of an objective, which stands at `key`, as (dotted key, message)."""
    advantage, ratio = objective.advantage.name, objective.ratio.name
    if advantage in OF_EACH_TOKEN and ratio in OF_A_RESPONSE:
        yield (
            f"{key}.ratio.name",
            f"{ratio} gives all tokens of a response one gradient, which undoes the advantage "
            f"{advantage} of each; use token, sequence_token or cispo",
        )
