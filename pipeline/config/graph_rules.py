"""Rules of the graph: from what experts may grow, and what rounds need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.violations import hint
from stages.kinds import COLD_START, EXPERT, settings_key
from stages.settings import DomainSettings


def graph_rules(
    run: Mapping[str, Any], domains: Mapping[str, DomainSettings | None]
) -> Iterator[tuple[str, str]]:
    """Every broken rule as (dotted key, message); a domain that is not valid itself is None."""
    known = [COLD_START, *(f"{EXPERT}{name}" for name in domains)]
    origins = {f"{EXPERT}{name}": each.from_ for name, each in domains.items() if each}
    for name, origin in origins.items():
        key = f"{settings_key(name)}.from"
        if origin is not None and origin not in known:
            yield key, f"no such stage: {origin}; {hint(origin, known)}"
        elif circle := _circle(name, origins):
            yield key, f"grows out of itself: {' from '.join(circle)}"
    model = run.get("model")
    random = isinstance(model, dict) and model.get("initial_weights") is None
    if random and not has_cold_start(run):
        yield (
            "cold_start",
            "null needs a model that can already answer: name one as model.initial_weights, or "
            "describe a cold start",
        )
    rounds = run.get("rounds", 1)
    if isinstance(rounds, int) and rounds > 1 and "merge" in run and run["merge"] is None:
        yield "rounds", f"{rounds} rounds need a merge, from which the next one grows"


def has_cold_start(run: Mapping[str, Any]) -> bool:
    """Whether there is one, or should be: a key that is missing is no null."""
    return run.get("cold_start", "missing") is not None


def _circle(name: str, origins: Mapping[str, str | None]) -> list[str]:
    """The way from a stage back to itself, or nothing."""
    way, origin = [name], origins.get(name)
    while origin is not None and origin not in way:
        way.append(origin)
        origin = origins.get(origin)
    return [*way, name] if origin == name else []
