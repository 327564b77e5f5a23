"""The seconds of a step's rollouts: decoding steps, and how many sequences each has."""

from __future__ import annotations

import math
from collections.abc import Iterator

from parallel.estimates.roofline.hardware import DataSheet, Efficiencies
from parallel.estimates.roofline.work import StepWorkload, always_used, expert_elements
from parallel.estimates.tensor_sizes import BYTES, cached_elements
from parallel.families import routed_layers
from parallel.settings import EngineSettings, ModelSettings

POINTS = 64  # of a rollout, at which a decoding step is timed
LEAST_SHARE, MOST_SHARE = 0.02, 0.98  # of the longest response that a mean may be


def rollout_seconds(
    model: ModelSettings,
    engine: EngineSettings,
    work: StepWorkload,
    gpu: DataSheet,
    reached: Efficiencies,
) -> float:
    """Return the seconds that the engines take for a step's sequences.

    Alone, a step ends with its longest response, and fewer and fewer sequences are decoded at once;
    with further steps in flight the engines stay full.
    """
    decoder = Decoder(model, engine, gpu, reached)
    sequences = work.sequences / (engine.count * engine.data)
    if work.steps_in_flight > 1:
        batch = min(engine.max_sequences, sequences * work.steps_in_flight)
        return sequences * work.mean_tokens / batch * decoder.seconds(batch, work.mean_tokens / 2)
    rounds = max(1.0, sequences / engine.max_sequences)
    tokens_per_point = work.most_tokens / POINTS
    alive = (
        decoder.seconds(max(1.0, share * sequences / rounds), place * work.most_tokens)
        for place, share in _surviving(work.mean_tokens / work.most_tokens)
    )
    return rounds * tokens_per_point * sum(alive)


class Decoder:
    """The decoding steps of an engine, whose model's elements are counted once for all of them."""

    def __init__(
        self, model: ModelSettings, engine: EngineSettings, gpu: DataSheet, reached: Efficiencies
    ) -> None:
        self._model, self._ranks, self._gpu, self._reached = model, engine.tensor, gpu, reached
        self._precision = 1 if engine.weights == "fp8" else BYTES[model.precision]
        self._always_used, self._expert = always_used(model), expert_elements(model)
        self._routed = len(routed_layers(model))
        self._cached = BYTES["bf16"] * cached_elements(model, engine.tensor)

    def seconds(self, batch: float, context: float) -> float:
        """Return the seconds of a decoding step of `batch` sequences of `context` tokens each."""
        model, ranks, gpu, reached = self._model, self._ranks, self._gpu, self._reached
        hidden = model.hidden_size
        used_share = 1 - (1 - model.experts_per_token / model.experts) ** batch
        experts = self._routed * used_share * model.experts * self._expert
        read = (self._always_used + experts + model.vocabulary_size * hidden) * self._precision
        memory = (read / ranks + batch * context * self._cached) / (
            gpu.memory_bandwidth * reached.memory
        )
        used = self._always_used + self._routed * model.experts_per_token * self._expert
        arithmetic = 2 * batch * used / ranks / (gpu.flops * reached.dense)
        return (
            memory
            + arithmetic
            + model.layers
            * (reached.decode_layer + 2 * _reduce_seconds(batch * hidden, ranks, gpu, reached))
        )


def _reduce_seconds(numbers: float, ranks: int, gpu: DataSheet, reached: Efficiencies) -> float:
    """Return the seconds of an all-reduce of bf16 numbers."""
    if ranks == 1:
        return 0.0
    sent = 2 * BYTES["bf16"] * numbers * (ranks - 1) / ranks
    if ranks <= gpu.linked:
        return reached.reduce + sent / (gpu.link_bandwidth * reached.link)
    return reached.far_reduce + sent / (gpu.network_bandwidth * gpu.linked * reached.network)


def _surviving(mean: float) -> Iterator[tuple[float, float]]:
    """Yield places in a rollout, 0 to 1, with the share of responses that still grow there.

    Lengths have the density exp(k x) on [0, 1], whose mean is the given one.
    """
    mean = min(max(mean, LEAST_SHARE), MOST_SHARE)
    low, high = -60.0, 60.0
    for _ in range(60):
        k = (low + high) / 2
        low, high = (k, high) if _mean_of(k) < mean else (low, k)
    for point in range(POINTS):
        x = (point + 0.5) / POINTS
        if abs(k) < 1e-6:
            yield x, 1 - x
        else:
            yield x, math.expm1(k - k * x) * math.exp(k * x) / math.expm1(k)


def _mean_of(k: float) -> float:
    return 0.5 if abs(k) < 1e-6 else 1 / -math.expm1(-k) - 1 / k
