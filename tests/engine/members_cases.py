"""The cases that a trainer runs against the members of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel.distributed import broadcast, is_main, on_main
from parallel.engine.fleet import Fleet, put_to_sleep
from parallel.engine.wire import Sampling, Wake
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings
from tests.engine.drawing import as_samples, request
from tests.engine.engine_cases import TRIES
from tests.engine.refit_cases import fleet, mismatch, policy

WEIGHTS = Wake("weights")
LONG = Sampling(temperature=1.0, max_tokens=200, end_tokens=(1,))


def refit_in_flight(
    addresses: tuple[Path, ...], model: str, layout: str, engine: str, versions: list[int]
) -> dict[str, Any]:
    """Refit repeatedly while one member alone samples, once after each ended response.

    On a busy machine all may have ended before the last refit: it is tried again.
    """
    trained, engines = policy(model, layout), fleet(addresses, model, layout, engine)
    losses = engines.losses
    for _ in range(TRIES):
        seen = broadcast(_versions_seen(trained, engines, model, versions))
        if seen == versions:
            break
    return {
        "versions": seen,
        "losses": engines.losses - losses,
        "mismatch": mismatch(trained, engines, versions[-1]),
    }


def _versions_seen(trained: Any, engines: Fleet, model: str, versions: list[int]) -> list[int]:
    """Return the weight versions of the tokens that are sampled; none but on rank 0."""
    trained.start_fresh(versions[0])
    engines.refit(trained, versions[0])
    stream = engines.live()[0].generate(request(LONG)) if is_main() else iter(())
    drawn = []
    for version in versions[1:]:
        drawn += [next(stream)] if is_main() else []
        trained.start_fresh(version)
        engines.refit(trained, version)
    if not is_main():
        return []
    drawn += stream
    seen: set[int] = set()
    for sample in as_samples(drawn, request(LONG), ModelSettings.model_validate_json(model)):
        assert sample.versions is not None
        seen |= set(sample.versions.tolist())
    return sorted(seen)


def turn(
    addresses: tuple[Path, ...], model: str, layout: str, engine: str, version: int
) -> dict[str, Any]:
    """Give an engine that sleeps its turns, as on GPUs that it shares with the trainer."""
    settings = EngineSettings.model_validate_json(engine)
    at = LayoutSettings.model_validate_json(layout)
    trained = policy(model, layout)
    engines = Fleet(list(addresses), ModelSettings.model_validate_json(model), at, settings)
    engines.sleeps = True
    engines.await_engines(lambda: None)
    trained.start_fresh(version)
    for _ in range(2):
        engines.refit(trained, version)
        engines.open_caches()
        engines.sleep()
    asleep = [client.describe().weight_version for client in engines.live()]
    engines.refit(trained, version)
    engines.open_caches()
    awake = [client.describe().weight_version for client in engines.live()]
    on_main(lambda: put_to_sleep(list(addresses), settings, needed=False))
    engines.refit(trained, version)
    engines.open_caches()
    return {
        "losses": engines.losses,
        "asleep": asleep,
        "awake": awake,
        "mismatch": mismatch(trained, engines, version),
    }
