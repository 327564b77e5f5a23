"""The cases that a trainer of one rank runs against engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from parallel.engine.client import EngineError
from parallel.engine.fleet import Fleet, RefitError
from parallel.engine.wire import Generation, Sampling
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings
from parallel.weights.executor import Outbox
from tests.engine.drawing import request
from tests.engine.refit_cases import fleet, policy

LAYOUT = LayoutSettings()
TRIES = 20  # of what a busy machine may be too slow for
SPREAD = 0.3  # of weights that give neither flat nor sharp distributions over tokens and experts

Weights = dict[str, np.ndarray]


def refit(address: Path, model: str, engine: str, version: int) -> Weights:
    """Refit an engine with random weights, seeded by the version; return them."""
    trained, engines = _trainer(address, model, engine)
    randomize(trained, version)
    engines.refit(trained, version)
    return exported(trained)


def turn(address: Path, model: str, engine: str, version: int) -> dict[str, bool]:
    """Give an engine that sleeps its turn, as on a GPU that it shares with the trainer."""
    trained = policy(model, LAYOUT.model_dump_json())
    settings = EngineSettings.model_validate_json(engine)
    engines = Fleet([address], ModelSettings.model_validate_json(model), LAYOUT, settings)
    engines.sleeps = True
    engines.await_engines(lambda: None)
    randomize(trained, version)
    for _ in range(2):
        engines.refit(trained, version)
        engines.open_caches()
        assert engines.live()
        engines.sleep()
        [client] = engines.live()
        assert client.describe().weight_version is None
    engines.refit(trained, version)
    engines.open_caches()
    assert engines.seconds > 0
    return {"sleeps": engines.losses == 0}


def refit_in_flight(
    address: Path, model: str, engine: str, versions: list[int], sampling: Sampling
) -> tuple[list[Generation], dict[int, Weights]]:
    """Refit repeatedly while responses are sampled, once after each ended response.

    On a busy machine all may have ended before the last refit: it is tried again.
    """
    trained, engines = _trainer(address, model, engine)
    for _ in range(TRIES):
        drawn = _refitted_in_flight(trained, engines, versions, sampling)
        if any(versions[-1] in np.frombuffer(each.versions, np.int32) for each in drawn):
            break
    weights = {}
    for version in versions:  # again, since the engine would not have waited for their export
        randomize(trained, version)
        weights[version] = exported(trained)
    return drawn, weights


def _refitted_in_flight(
    trained: Any, engines: Fleet, versions: list[int], sampling: Sampling
) -> list[Generation]:
    randomize(trained, versions[0])
    engines.refit(trained, versions[0])
    [client] = engines.live()
    stream = client.generate(request(sampling))
    drawn = []
    for version in versions[1:]:
        drawn.append(next(stream))
        randomize(trained, version)
        engines.refit(trained, version)
    return [*drawn, *stream]


def refused(address: Path, model: str, engine: str) -> str:
    """Return the error with which a fleet rejects an engine."""
    trained, engines = _trainer(address, model, engine)
    try:
        engines.refit(trained, 1)
    except EngineError as error:
        return str(error)
    raise AssertionError("the engine was refitted")


class CorruptingOutbox(Outbox):
    """An outbox that flips one bit of layer 1."""

    def send(self) -> None:
        parameter = self.parameters["0/decoder.layers.1.self_attention.linear_qkv.weight"]
        bits = parameter.data.view(torch.int32)
        bits[5, 7] ^= 1  # the lowest: no log-probability would show it
        super().send()
        bits[5, 7] ^= 1


def refit_corrupted(address: Path, model: str, engine: str) -> str:
    """Return the notices of a refit that corrupts a bit."""
    trained = policy(model, LAYOUT.model_dump_json())
    engines = Fleet(
        [address],
        ModelSettings.model_validate_json(model),
        LAYOUT,
        EngineSettings.model_validate_json(engine),
    )
    try:
        with mock.patch("parallel.engine.fleet.Outbox", CorruptingOutbox):
            engines.refit(trained, 1)
    except RefitError as error:
        return str(error)
    raise AssertionError("nobody has seen it")


@torch.no_grad()
def randomize(trained: Any, seed: int) -> None:
    """Fill matrices and biases with random values; biases of zero would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in trained.named_weights().items():
        if tensor.dim() > 1 or "bias" in name or "softmax_offset" in name:
            tensor.normal_(0, SPREAD, generator=generator)
    trained.weights_changed()


def exported(trained: Any) -> Weights:
    return {name: tensor.detach().float().numpy().copy() for name, tensor in trained.weights()}


def _trainer(address: Path, model: str, engine: str) -> tuple[Any, Any]:
    layout = LAYOUT.model_dump_json()
    return policy(model, layout), fleet((address,), model, layout, engine)
