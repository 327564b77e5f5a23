"""Samples become padded micro-batches, the same number on every data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from parallel.device import device
from parallel.sample import Sample


@dataclass
class MicroBatch:
    """B right-padded sequences of T tokens; entry [b, t] of `targets` follows `tokens` [b, t].

    tokens, targets, positions: int64 [B, T]. mask: bool [B, T], true where the target is a response
    token. engine_logprobs: fp32 [B, T], mu of the target, 0 outside the mask. advantages: fp32 [B].
    routes: int64 [layers, T * B, experts_per_token] in Megatron's token order, or None.
    old_logprobs and reference_logprobs: fp32 [B, T], added before the batch is trained on.
    """

    samples: list[Sample]
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor
    routes: torch.Tensor | None
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None

    def without_routes(self) -> MicroBatch:
        """The same batch for another model, which routes by itself."""
        return replace(self, routes=None)


def split(
    samples: Sequence[Sample], rank: int, ranks: int, sequences: int, replay: bool
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of at most `sequences` samples.

    Samples are dealt out by length, so that every rank gets as many, of like lengths, and a
    micro-batch holds little padding. Expert parallelism needs every rank to run the same number of
    forward passes.

    Raises ValueError when the ranks cannot get the same number of samples.
    """
    if len(samples) % ranks:
        raise ValueError(f"{len(samples)} samples cannot be dealt evenly to {ranks} ranks")
    by_length = sorted(range(len(samples)), key=lambda i: (-samples[i].length, i))
    mine = [samples[i] for i in by_length[rank::ranks]]
    return [collate(mine[i : i + sequences], replay) for i in range(0, len(mine), sequences)]


def collate(samples: list[Sample], replay: bool) -> MicroBatch:
    """Pad samples on the right to the longest and move them to this rank's device."""
    shape = (len(samples), max(sample.length for sample in samples))
    tokens = np.zeros(shape, np.int64)
    targets = np.zeros(shape, np.int64)
    mask = np.zeros(shape, bool)
    engine_logprobs = np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        sequence = np.concatenate([sample.prompt, sample.response])
        response = slice(len(sample.prompt) - 1, sample.length)
        tokens[row, : sample.length] = sequence[:-1]
        targets[row, : sample.length] = sequence[1:]
        mask[row, response] = True
        if sample.logprobs is not None:
            engine_logprobs[row, response] = sample.logprobs
    place = device()
    return MicroBatch(
        samples=samples,
        tokens=torch.from_numpy(tokens).to(place),
        targets=torch.from_numpy(targets).to(place),
        positions=torch.arange(shape[1], device=place).expand(shape),
        mask=torch.from_numpy(mask).to(place),
        engine_logprobs=torch.from_numpy(engine_logprobs).to(place),
        advantages=torch.tensor([sample.advantage for sample in samples], device=place),
        routes=_collate_routes(samples, shape[1]).to(place) if replay else None,
    )


def _collate_routes(samples: list[Sample], width: int) -> torch.Tensor:
    """[layers, width * B, experts_per_token]; padding is sent to the first experts."""
    first = samples[0].routes
    if first is None:
        raise ValueError("routing replay needs samples with routes")
    layers, experts = first.shape[1:]
    routes = np.empty((layers, width, len(samples), experts), np.int64)
    routes[:] = np.arange(experts)
    for row, sample in enumerate(samples):
        assert sample.routes is not None
        routes[:, : sample.length, row] = sample.routes.transpose(1, 0, 2)
    return torch.from_numpy(routes.reshape(layers, width * len(samples), experts))
