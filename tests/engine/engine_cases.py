"""What a trainer of one rank does to engines in their tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawing import request
from refit_cases import fleet, policy

from parallel.rollout.client import EngineError
from parallel.rollout.fleet import Fleet, RefitError
from parallel.rollout.wire import Generation, Sampling
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings

LAYOUT = LayoutSettings()
SPREAD = 0.3  # of weights whose distributions over tokens and experts are neither flat nor sharp

Weights = dict[str, np.ndarray]


def refit(address: Path, model: str, engine: str, version: int) -> Weights:
    """Bring random weights, which the version seeds, to an engine; returns them."""
    trained, engines = _trainer(address, model, engine)
    weights = randomize(trained, version)
    engines.refit(trained, version)
    return weights


def refit_in_flight(
    address: Path, model: str, engine: str, versions: list[int], sampling: Sampling
) -> tuple[list[Generation], dict[int, Weights]]:
    """Refit again and again while responses are drawn, each time when another one has ended."""
    trained, engines = _trainer(address, model, engine)
    weights = {versions[0]: randomize(trained, versions[0])}
    engines.refit(trained, versions[0])
    [client] = engines.live()
    stream = client.generate(request(sampling, samples=8))
    drawn = []
    for version in versions[1:]:
        drawn.append(next(stream))
        weights[version] = randomize(trained, version)
        engines.refit(trained, version)
    return [*drawn, *stream], weights


def refused(address: Path, model: str, engine: str) -> str:
    """Why a fleet does not take an engine."""
    trained, engines = _trainer(address, model, engine)
    try:
        engines.refit(trained, 1)
    except EngineError as error:
        return str(error)
    raise AssertionError("the engine was refitted")


class CorruptingFleet(Fleet):
    """Sends one bit of layer 1 wrong."""

    def _send(self) -> None:
        assert self._outbox is not None
        parameter = self._outbox.parameters["0/decoder.layers.1.self_attention.linear_qkv.weight"]
        bits = parameter.data.view(torch.int32)
        bits[5, 7] ^= 1  # the lowest: no log-probability would show it
        super()._send()
        bits[5, 7] ^= 1


def refit_corrupted(address: Path, model: str, engine: str) -> str:
    """What a refit says whose bytes do not all arrive as they were."""
    trained = policy(model, LAYOUT.model_dump_json())
    engines = CorruptingFleet(
        [address],
        ModelSettings.model_validate_json(model),
        LAYOUT,
        EngineSettings.model_validate_json(engine),
    )
    try:
        engines.refit(trained, 1)
    except RefitError as error:
        return str(error)
    raise AssertionError("nobody has seen it")


@torch.no_grad()
def randomize(trained: Any, seed: int) -> Weights:
    """Give every matrix and every bias random values; returns all weights, in Hugging Face's names.

    A policy's own start leaves biases zero, which would hide them.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in trained.named_weights().items():
        if tensor.dim() > 1 or "bias" in name:
            tensor.normal_(0, SPREAD, generator=generator)
    trained.weights_changed()
    return {name: tensor.numpy().copy() for name, tensor in trained.weights()}


def _trainer(address: Path, model: str, engine: str) -> tuple[Any, Any]:
    layout = LAYOUT.model_dump_json()
    return policy(model, layout), fleet((address,), model, layout, engine)
