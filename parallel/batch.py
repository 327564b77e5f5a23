"""Samples become packed micro-batches, the same number on every data-parallel rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from parallel.device import device
from parallel.sample import Sample

ROW_TOKENS = 64  # rows at least this wide waste little; wider ones cost more attention


@dataclass
class MicroBatch:
    """B samples, packed into R rows of W tokens for the model and unpacked for the objectives.

    What the model reads: tokens and positions int64 [R, W]; attention bool [R, 1, W, W], true where
    a token may look; routes int64 [layers, W * R, experts_per_token] in Megatron's token order, or
    None.

    What the objectives read, one row a response of at most T tokens: targets int64 [B, T]; mask
    bool [B, T]; position int64 [B, T], the place of the logits that predict each target in the
    flattened rows; engine_logprobs fp32 [B, T], mu, 0 outside the mask; advantages fp32 [B];
    old_logprobs and reference_logprobs fp32 [B, T], added before the batch is trained on.
    """

    samples: list[Sample]
    tokens: torch.Tensor
    positions: torch.Tensor
    attention: torch.Tensor
    routes: torch.Tensor | None
    targets: torch.Tensor
    mask: torch.Tensor
    position: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None

    def without_routes(self) -> MicroBatch:
        """The same batch for another model, which routes by itself."""
        return replace(self, routes=None)


def split(
    samples: Sequence[Sample], rank: int, ranks: int, token_budget: int, replay: bool
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of about `token_budget` tokens at most.

    Samples are dealt out by length, so that ranks and micro-batches get alike many tokens. Expert
    parallelism needs every rank to run the same number of forward passes, so the fullest rank
    decides how many there are; none is smaller than one sample.

    Raises ValueError when there are fewer samples than ranks.
    """
    shares = _deal(samples, ranks)
    fullest = max(sum(sample.length for sample in share) for share in shares)
    if not all(shares):
        raise ValueError(f"{len(samples)} samples are too few for {ranks} ranks")
    count = min(-(-fullest // token_budget), *map(len, shares))
    return [collate(part, replay) for part in _deal(shares[rank], count)]


def collate(samples: list[Sample], replay: bool) -> MicroBatch:
    """Pack samples into rows and move them to this rank's device."""
    width = max(ROW_TOKENS, *(sample.length for sample in samples))
    places = _pack([sample.length for sample in samples], width)
    rows = 1 + max(row for row, _ in places)
    tokens = np.zeros((rows, width), np.int64)
    positions = np.zeros((rows, width), np.int64)
    segment = np.full((rows, width), -1)
    responses = (len(samples), max(len(sample.response) for sample in samples))
    targets = np.zeros(responses, np.int64)
    mask = np.zeros(responses, bool)
    position = np.zeros(responses, np.int64)
    engine_logprobs = np.zeros(responses, np.float32)
    for index, (sample, (row, start)) in enumerate(zip(samples, places, strict=True)):
        read = np.concatenate([sample.prompt, sample.response])[:-1]
        tokens[row, start : start + sample.length] = read
        positions[row, start : start + sample.length] = np.arange(sample.length)
        segment[row, start : start + sample.length] = index
        count = len(sample.response)
        first = row * width + start + len(sample.prompt) - 1
        targets[index, :count] = sample.response
        mask[index, :count] = True
        position[index, :count] = np.arange(first, first + count)
        if sample.logprobs is not None:
            engine_logprobs[index, :count] = sample.logprobs
    place = device()
    return MicroBatch(
        samples=samples,
        tokens=torch.from_numpy(tokens).to(place),
        positions=torch.from_numpy(positions).to(place),
        attention=_attention(torch.from_numpy(segment).to(place)),
        routes=_routes(samples, places, rows, width).to(place) if replay else None,
        targets=torch.from_numpy(targets).to(place),
        mask=torch.from_numpy(mask).to(place),
        position=torch.from_numpy(position).to(place),
        engine_logprobs=torch.from_numpy(engine_logprobs).to(place),
        advantages=torch.tensor([sample.advantage for sample in samples], device=place),
    )


def _deal(samples: Sequence[Sample], hands: int) -> list[list[Sample]]:
    """Give each sample, longest first, to the hand with the fewest tokens so far."""
    loads = [(0, hand) for hand in range(hands)]
    dealt: list[list[Sample]] = [[] for _ in range(hands)]
    for sample in sorted(samples, key=lambda sample: -sample.length):
        load, hand = loads[0]
        dealt[hand].append(sample)
        heapq.heapreplace(loads, (load + sample.length, hand))
    return dealt


def _pack(lengths: list[int], width: int) -> list[tuple[int, int]]:
    """A (row, start) for every sequence, longest first into the first row with room."""
    filled: list[int] = []
    places = [(0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = (row for row, used in enumerate(filled) if used + lengths[index] <= width)
        row = next(room, len(filled))
        if row == len(filled):
            filled.append(0)
        places[index] = (row, filled[row])
        filled[row] += lengths[index]
    return places


def _attention(segment: torch.Tensor) -> torch.Tensor:
    """[R, 1, W, W]: a token sees itself and what stands before it in its own sequence.

    Padding sees padding, since a softmax over nothing would be NaN.
    """
    same = segment[:, :, None] == segment[:, None, :]
    return same.tril().unsqueeze(1)


def _routes(
    samples: list[Sample], places: list[tuple[int, int]], rows: int, width: int
) -> torch.Tensor:
    """[layers, width * rows, experts_per_token]; padding is sent to the first experts."""
    if samples[0].routes is None:
        raise ValueError("routing replay needs samples with routes")
    layers, experts = samples[0].routes.shape[1:]
    routes = np.empty((layers, width, rows, experts), np.int64)
    routes[:] = np.arange(experts)
    for sample, (row, start) in zip(samples, places, strict=True):
        assert sample.routes is not None
        routes[:, start : start + sample.length, row] = sample.routes.transpose(1, 0, 2)
    return torch.from_numpy(routes.reshape(layers, width * rows, experts))
