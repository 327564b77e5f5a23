"""Rules between what every token of a response is credited with, its ratio, and its rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stages.domains.rewards.settings import PythonReward
from stages.objectives.settings import ObjectiveSettings
from stages.settings import DomainSettings

Found = Iterator[tuple[str, str]]

OF_EACH_TOKEN = ("process", "gae")  # advantages
OF_A_RESPONSE = ("sequence", "geometric", "rspo")  # ratios


def credit_rules(
    key: str, objective: ObjectiveSettings, domains: Iterable[DomainSettings]
) -> Found:
    """Every broken rule of an objective, which stands at `key`, that learns from the rewards of
    `domains`, as (dotted key, message)."""
    advantage, ratio = objective.advantage.name, objective.ratio.name
    if advantage in OF_EACH_TOKEN and ratio in OF_A_RESPONSE:
        yield (
            f"{key}.ratio.name",
            f"{ratio} gives all tokens of a response one gradient, which undoes the advantage "
            f"{advantage} of each; use token, sequence_token or cispo",
        )
    if advantage == "process" and not all(map(_may_judge_steps, domains)):
        yield (
            f"{key}.advantage.name",
            "process needs the rewards of a response's steps, which only a reward of kind python "
            "gives; use grpo",
        )


def _may_judge_steps(domain: DomainSettings) -> bool:
    return any(isinstance(reward, PythonReward) for reward in domain.rewards.values())
