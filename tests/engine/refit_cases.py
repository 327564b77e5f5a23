"""The cases of refits that the trainer's ranks run; state persists between calls."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from parallel.engine.wire import Sampling
from parallel.sample import Sample
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings
from parallel.weights.needs import needed
from tests.engine.drawing import draw

SHORT = Sampling(temperature=1.0, max_tokens=4, end_tokens=(1,))  # ranks of an engine wait spinning


@functools.lru_cache(maxsize=1)
def policy(model: str, layout: str) -> Any:
    from parallel.model.policy import Policy

    trained = Policy(
        ModelSettings.model_validate_json(model), LayoutSettings.model_validate_json(layout)
    )
    trained.start_fresh(0)  # what cases leave as it is would else be whatever the memory held
    return trained


@functools.lru_cache(maxsize=1)
def fleet(addresses: tuple[Path, ...], model: str, layout: str, engine: str) -> Any:
    from parallel.engine.fleet import Fleet

    return Fleet(
        list(addresses),
        ModelSettings.model_validate_json(model),
        LayoutSettings.model_validate_json(layout),
        EngineSettings.model_validate_json(engine),
    )


def refit(
    addresses: tuple[Path, ...], model: str, layout: str, engine: str, seeds: list[int]
) -> dict[str, Any]:
    """Refit with the weights of each seed; return the engines' state after the last."""
    trained = policy(model, layout)
    engines = fleet(addresses, model, layout, engine)
    data = engines.settings.data
    for seed in seeds:
        trained.start_fresh(seed)
        metrics = engines.refit(trained, seed)
    return {
        **metrics,
        "wrong": wrong_tensors(trained, engines, ModelSettings.model_validate_json(model)),
        "mismatch": mismatch(trained, engines, seeds[-1]),
        "bound": max(
            bytes_needed(ModelSettings.model_validate_json(model), size, rank, data)
            for size in (reports(engines) or [1])
            for rank in range(size * data)
        ),
    }


def reports(engines: Any) -> list[int]:
    """Return the number of ranks of every engine, or member of one."""
    from parallel.distributed import broadcast

    return broadcast([len(report.ranks) for report in engines.reports])


def bytes_needed(model: ModelSettings, size: int, rank: int, data: int) -> int:
    boxes = needed(model, size * data, rank, data=data)
    return sum(4 * int(np.prod(box[1])) for _, box in boxes)


def wrong_tensors(trained: Any, engines: Any, model: ModelSettings) -> list[str]:
    """Return the engine ranks and buckets whose fingerprints differ from the whole tensors'."""
    from parallel.distributed import is_main
    from parallel.hugging_face.weights import unstacked
    from parallel.weights.executor import add_fingerprints, fingerprint
    from parallel.weights.names import bucket_of, stored_tensors

    stacks = {name: stack for name, _, stack in stored_tensors(model)}
    whole: dict[str, Any] = {}
    for name, tensor in trained.weights():
        whole.update(unstacked(name, tensor.clone(), stacks[name]))
    found, data = [], engines.settings.data
    for number, report in enumerate(engines.reports if is_main() else []):
        for rank, landed in enumerate(report.ranks):
            expected: dict[str, int] = {}
            size = len(report.ranks)
            at = number % data * size + rank
            for name, (offsets, sizes) in needed(model, size * data, at, data=data):
                place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                key = str(bucket_of(name))
                value = fingerprint(name, (offsets, sizes), whole[name][place])
                expected[key] = add_fingerprints(expected.get(key, 0), value)
            theirs = {key: int(value) for key, value in landed.fingerprints.items()}
            found += [
                f"engine {number} rank {rank} bucket {key}"
                for key in expected.keys() | theirs.keys()
                if expected.get(key) != theirs.get(key)
            ]
    return found


def mismatch(trained: Any, engines: Any, version: int) -> float:
    """Return the largest |log mu - log pi|; every prompt is sampled twice, then from the cache."""
    from parallel import batch
    from parallel.batch import RankPlace
    from parallel.distributed import broadcast, is_main
    from stages.sampling.logprob_check import measure_mismatch

    drawn: list[Sample] = []
    for client in engines.live() if is_main() else []:
        for _ in range(2):
            drawn += draw(client, SHORT, seed=version, model=trained.settings)
    assert {each.weight_version for each in drawn} <= {version}
    batches = batch.split(broadcast(drawn), RankPlace.here(), 4096, replay=True)
    return measure_mismatch(trained, batches, temperature=1.0).metrics["mismatch_max"]
