"""Micro-batches of packed samples, the same number on every data-parallel rank.

The samples of a micro-batch are packed into one row of slots (Megatron's thd layout), a slot for
every sequence. Under context parallelism of C a slot is a multiple of 2C tokens, cut into 2C pieces
of which rank r holds pieces r and 2C - 1 - r: this balances causal attention over the ranks, and is
the order TransformerEngine expects. Padding is at the end of a slot, where no token of a causal
model attends to it and no objective reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from parallel import micro_batches, packed_row
from parallel.machine.device import device
from parallel.micro_batches import slot_tokens
from parallel.model import vocabulary
from parallel.model.vocabulary import HeadLogits, KeptLogits
from parallel.packed_row import PackedRow, RankPlace
from parallel.sample import Sample


@dataclass
class MicroBatch:
    """B samples: packed into one row for the model, one row per response for the objectives.

    Example: prompts [5, 9, 2] and [4], responses [7, 0] and [8, 3, 0]; B = 2, R = 3, T = 7, n = 5.

        tokens    = [[5, 9, 2, 7, 4, 8, 3]]     the last of each response predicts nothing
        positions = [[0, 1, 2, 3, 0, 1, 2]]     row.starts = [0, 4, 7]
        predicts  = [2, 3, 4, 5, 6]             place = [0, 1, 3, 4, 5] of the flattened [2, 3]
        targets   = [[7, 0, 0], [8, 3, 0]]      mask = [[1, 1, 0], [1, 1, 1]]
    """

    samples: list[Sample]
    # For the model, this context-parallel rank's share of T tokens:
    tokens: Tensor  # int64 [1, T / C]
    positions: Tensor  # int64 [1, T / C], from 0 in every sequence
    row: PackedRow  # that they are from
    # Between the two, for the n trained response tokens that this rank predicts:
    predicts: Tensor  # int64 [n], which of the rank's tokens predicts each
    place: Tensor  # int64 [n], the index of each in [B * R]
    # For the objectives, whole on every rank, at most R tokens per response:
    targets: Tensor  # int64 [B, R]
    mask: Tensor  # bool [B, R], the tokens to train on
    engine_logprobs: Tensor  # mu, fp32 [B, R], in nats, 0 outside the mask
    advantages: Tensor  # fp32 [B, R], 0 outside the mask
    # int64 [n, S], padded with -1: the ids that top-p or top-k sampling left of the vocabulary.
    # None, and a row of -1 only, keep all.
    kept: Tensor | None = None
    # Added on the last pipeline stage where the objective asks for them, fp32 [B, R]:
    old_logprobs: Tensor | None = None  # in nats, as the next two
    old_entropies: Tensor | None = None
    reference_logprobs: Tensor | None = None
    weights: Tensor | None = None  # of tokens that pi_old did not sample
    router_movement: Tensor | None = None  # in nats
    values: Tensor | None = None  # of a critic, 0 outside the mask
    returns: Tensor | None = None  # the critic's targets, 0 outside the mask
    # Logits [n, vocabulary / TP], added likewise:
    reference: HeadLogits | None = None
    teachers: Sequence[KeptLogits] = ()  # of the domain, as its settings order them
    domain: str = ""
    demonstrated: bool = False  # its samples are, and no engine has sampled them
    # Added likewise where its samples record them, fp32 [B, R] by column.
    recorded: dict[str, Tensor] = field(default_factory=dict)

    @property
    def own_targets(self) -> Tensor:
        """The targets, int64 [n], that this rank predicts."""
        return self.targets.flatten()[self.place]

    def spread(self, values: Tensor) -> Tensor:
        """Return the values [n] of every context-parallel rank's tokens as [B, R] on all ranks.

        Differentiable. Each rank computes the same loss from the whole tensor; its gradient reaches
        only the rank's own tokens, so that summed over ranks every token counts once.
        """
        whole = values.new_zeros(self.mask.numel()).index_put((self.place,), values)
        if parallel_state.get_context_parallel_world_size() > 1:
            group = parallel_state.get_context_parallel_group()
            whole = reduce_from_tensor_model_parallel_region(whole, group=group)
        return whole.view(self.mask.shape)

    def without_routes(self) -> MicroBatch:
        """Return the batch for another model, which routes by itself."""
        return replace(self, row=replace(self.row, routes=None))


@dataclass
class Responses:
    """A model's logits [n, vocabulary / TP] at the n response tokens that this rank predicts.

    Every method returns fp32 [B, R], identical on all tensor- and context-parallel ranks, defined
    under the batch's mask, and differentiable where the logits are.

    Waits for: the tensor- and context-parallel ranks of this pipeline stage, in every method.
    Unblocked by: the same call on each of them, on the same micro-batch.

    Example: logits [5, vocabulary / TP] of the batch in `MicroBatch`; `logprobs()` is [2, 3], with
    log pi of 7 and 0 in its first row, and of 8, 3 and 0 in its second.
    """

    logits: Tensor | HeadLogits
    batch: MicroBatch

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        """Return log pi of every target in nats, renormalised on the batch's kept sets."""
        targets, kept_sets = self.batch.own_targets, self.batch.kept
        return self.batch.spread(vocabulary.logprobs(self.logits, targets, temperature, kept_sets))

    def entropy(self, temperature: float = 1.0) -> Tensor:
        """Return the entropy over the batch's kept sets at every response token, in nats."""
        return self.batch.spread(vocabulary.entropy(self.logits, temperature, self.sampled_from))

    def kept_kl(self, other: Tensor | HeadLogits, temperature: float = 1.0) -> Tensor:
        """Return KL(this || other) over the batch's kept sets at every response token, in nats.

        Its mean over samples is that of the estimators from `logprobs`, which `kl`'s is not.
        """
        return self.batch.spread(vocabulary.kl(self.logits, other, temperature, self.sampled_from))

    def kl(self, other: Tensor | HeadLogits, temperature: float = 1.0) -> Tensor:
        """Return KL(this || other) over the whole vocabulary at every response token, in nats."""
        return self.batch.spread(vocabulary.kl(self.logits, other, temperature))

    @property
    def sampled_from(self) -> Tensor | None:
        """The kept sets with the targets, int64 [n, S + 1], over which `logprobs` renormalises."""
        if self.batch.kept is None:
            return None
        return vocabulary.with_targets(self.batch.kept, self.batch.own_targets.unsqueeze(1))


def split(
    samples: Sequence[Sample],
    here: RankPlace,
    token_budget: int,
    replay: bool,
    padded: bool = False,
    together: int = 1,
) -> list[MicroBatch]:
    """Return this data-parallel rank's micro-batches of about `token_budget` tokens per device.

    Samples are dealt by length, so that ranks and micro-batches get similar numbers of tokens.
    `parallel.micro_batches` says how many there are and how long one may be. A micro-batch is empty
    only where there are fewer samples than micro-batches. `padded` pads every sample of a
    micro-batch to its longest, the baseline that packing is compared with. Each `together`
    consecutive samples, such as the two of a pair, are in one micro-batch, in their order.
    """
    # Every rank deals to all ranks, since all need the same number of micro-batches.
    shares = deal(samples, here.data, together)
    lengths = [
        [[sample.length for sample in unit] for unit in _units(share, together)] for share in shares
    ]
    count = micro_batches.micro_batch_count(lengths, token_budget, here.context, here.round)
    dealt = deal(shares[here.data_rank], count, together)
    return [collate(share, here, replay, padded) for share in dealt]


def deal(samples: Sequence[Sample], hands: int, together: int = 1) -> list[list[Sample]]:
    """Give each sample, longest first, to the hand with the fewest tokens so far.

    Each `together` consecutive samples go to one hand, in their order.
    """
    units = _units(samples, together)
    lengths = [sum(sample.length for sample in unit) for unit in units]
    return [
        [sample for position in hand for sample in units[position]]
        for hand in micro_batches.deal(lengths, hands)
    ]


def _units(samples: Sequence[Sample], together: int) -> list[Sequence[Sample]]:
    """Return each `together` consecutive samples."""
    return [samples[at : at + together] for at in range(0, len(samples), together)]


def collate(
    samples: list[Sample], here: RankPlace, replay: bool, padded: bool = False
) -> MicroBatch:
    """Pack samples into a row and return this rank's share of it, on its device.

    Example: the batch that `MicroBatch` shows.

        >>> samples = [
        ...     Sample("math", np.array(prompt, np.int32), np.array(response, np.int32))
        ...     for prompt, response in (([5, 9, 2], [7, 0]), ([4], [8, 3, 0]))
        ... ]
        >>> batch = collate(samples, RankPlace(), replay=False)
        >>> batch.tokens.tolist(), batch.positions.tolist()
        ([[5, 9, 2, 7, 4, 8, 3]], [[0, 1, 2, 3, 0, 1, 2]])
        >>> batch.predicts.tolist(), batch.place.tolist(), batch.targets.tolist()
        ([2, 3, 4, 5, 6], [0, 1, 3, 4, 5], [[7, 0, 0], [8, 3, 0]])
    """
    lengths = [sample.length for sample in samples]
    row = lay_out(lengths, here, max(lengths, default=1) if padded else None)
    tokens, positions = (np.zeros(row.tokens, np.int64) for _ in range(2))
    place = np.full(row.tokens, -1)  # of the response token that a token predicts; -1: none
    responses = (len(samples), max((len(sample.response) for sample in samples), default=1))
    targets = np.zeros(responses, np.int64)
    mask = np.zeros(responses, bool)
    engine_logprobs, advantages = (np.zeros(responses, np.float32) for _ in range(2))
    for index, (sample, start) in enumerate(zip(samples, row.starts, strict=False)):
        tokens[start : start + sample.length] = [*sample.prompt, *sample.response[:-1]]
        positions[start : start + sample.length] = np.arange(sample.length)
        count, learned = len(sample.response), sample.learned
        first_predictor = start + len(sample.prompt) - 1
        place[first_predictor + learned] = index * responses[1] + learned
        targets[index, :count] = sample.response
        mask[index, learned] = True
        token_advantages = sample.advantages
        advantages[index, learned] = (
            sample.advantage if token_advantages is None else token_advantages[learned]
        )
        if sample.logprobs is not None:
            engine_logprobs[index, learned] = sample.logprobs[learned]
    if replay and samples:
        row.routes = _moved(_routes(samples, row))
    own_place = place[row.local_positions]
    predicts = np.flatnonzero(own_place >= 0)
    return MicroBatch(
        samples=samples,
        tokens=_moved(tokens[row.local_positions])[None],
        positions=_moved(positions[row.local_positions])[None],
        row=row,
        predicts=_moved(predicts),
        place=_moved(own_place[predicts]),
        targets=_moved(targets),
        mask=_moved(mask),
        engine_logprobs=_moved(engine_logprobs),
        advantages=_moved(advantages),
        kept=_kept(samples, own_place[predicts], responses[1]),
    )


def lay_out(lengths: list[int], place: RankPlace, slot: int | None = None) -> PackedRow:
    """Return a row for sequences of these lengths, with slots of at least `slot` tokens.

    Without sequences the row is padding only, so that a rank without samples still takes part in
    the collectives of a forward pass.
    """
    slots = [slot_tokens(max(length, slot or 1), place.context) for length in lengths]
    filler = -sum(slots) % place.row or (0 if slots else place.row)
    if filler:
        slots.append(filler)
    starts = np.concatenate([[0], np.cumsum(slots)])
    local_positions = packed_row.local_positions(starts, place)
    real = np.zeros(starts[-1], bool)
    for start, length in zip(starts, lengths, strict=False):
        real[start : start + length] = True
    edges = _moved(starts.astype(np.int32))
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        max_seqlen_q=max(slots),
        max_seqlen_kv=max(slots),
        starts=starts,
        local_positions=local_positions,
        real=_moved(real[local_positions]),
    )


def token_counts(batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Return this rank's numbers of tokens, `real` ones and `computed` ones with padding."""
    real = sum(sample.length for batch in batches for sample in batch.samples)
    return {"real": float(real), "computed": float(sum(batch.row.tokens for batch in batches))}


def _moved(values: np.ndarray) -> Tensor:
    """Return the values on this rank's device; a GPU copies them while the host works."""
    tensor, place = torch.from_numpy(values), device()
    # The copy reads the pinned block later; torch reuses the block only after that.
    pinned = tensor.pin_memory() if place.type == "cuda" else tensor
    return pinned.to(place, non_blocking=True)


def _kept(samples: list[Sample], place: np.ndarray, longest: int) -> Tensor | None:
    """Return the kept sets of the tokens at `place` in [B * longest], padded with -1."""
    if all(sample.kept is None for sample in samples):
        return None
    tokens = zip(*np.divmod(place, longest), strict=True)
    sets = [
        () if (token_sets := samples[index].kept) is None else token_sets[token]
        for index, token in tokens
    ]
    padded = np.full((len(sets), max(map(len, sets), default=0)), -1)
    for row, ids in zip(padded, sets, strict=True):
        row[: len(ids)] = ids
    return _moved(padded)


def _routes(samples: list[Sample], row: PackedRow) -> np.ndarray:
    """Return routes [routed layers, T / C, experts_per_token]; padding takes the first experts."""
    if samples[0].routes is None:
        raise ValueError("routing replay needs samples with routes")
    layers, experts = samples[0].routes.shape[1:]
    routes = np.tile(np.arange(experts), (row.tokens, layers, 1))
    for sample, start in zip(samples, row.starts, strict=False):
        assert sample.routes is not None
        routes[start : start + sample.length] = sample.routes
    return np.ascontiguousarray(routes[row.local_positions].transpose(1, 0, 2))
