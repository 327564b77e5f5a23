"""Rules of the graph: from what experts may grow, and what rounds need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.config.violations import hint
from stages.kinds import COLD_START, EXPERT, settings_key
from stages.settings import DomainSettings, RunSettings


def graph_rules(run: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield every broken rule of a run's graph as (dotted key, message)."""
    yield from origin_rules(run.domains)
    if run.cold_start is None and run.model.initial_weights is None:
        yield (
            "cold_start",
            "null needs a model that can already answer: name one as model.initial_weights, or "
            "describe a cold start",
        )
    if run.rounds > 1 and run.merge is None:
        yield "rounds", f"{run.rounds} rounds need a merge, from which the next one grows"


def origin_rules(domains: Mapping[str, DomainSettings]) -> Iterator[tuple[str, str]]:
    """Yield every `from` of a domain that names no stage, or leads back to itself."""
    known = [COLD_START, *(f"{EXPERT}{name}" for name in domains)]
    origins = {f"{EXPERT}{name}": each.from_ for name, each in domains.items()}
    for name, origin in origins.items():
        key = f"{settings_key(name)}.from"
        if origin is not None and origin not in known:
            yield key, f"no such stage: {origin}; {hint(origin, known)}"
        elif circle := _circle(name, origins):
            yield key, f"grows out of itself: {' from '.join(circle)}"


def _circle(name: str, origins: Mapping[str, str | None]) -> list[str]:
    """The way from a stage back to itself, or nothing."""
    way, origin = [name], origins.get(name)
    while origin is not None and origin not in way:
        way.append(origin)
        origin = origins.get(origin)
    return [*way, name] if origin == name else []
