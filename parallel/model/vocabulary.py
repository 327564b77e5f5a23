"""Log-probabilities, entropy, KL and top-k of logits split over the tensor-parallel ranks.

Logits are [n, vocabulary / TP] of any float dtype. Rank r of the tensor-parallel group holds ids
r * vocabulary / TP and on, and every rank has the same rows, targets and kept sets. Results are
fp32 (fp64 for fp64 logits) and equal on every rank. They are differentiable, given the same
upstream gradient on every rank: each rank then fills its part of the gradient.

A full-precision copy of the logits would be the largest tensor of a training step, so no function
makes one: each processes the rows in chunks, keeps a few sums per row, and recomputes the chunk in
its backward. Ranks exchange only these sums, in one all-gather for all chunks.

In the code x = logits / temperature, y is x of a second set, and e = exp(x - max x). Everything is
computed relative to the row's maximum, so that logits of any size keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.machine.device import LOSS_CHUNK_BYTES, device

# Replaces -inf: its exponential is 0 too, but its differences and products are finite.
LOWEST = -1e30


Head = Tensor | Callable[[], Tensor]


def head_logits(hidden: Tensor, weight: Tensor, precise: bool) -> Tensor:
    """Return hidden [n, H] times the head's weight [V, H], as [n, V]: fp32 if precise."""
    if not precise or hidden.dtype != torch.bfloat16:
        return hidden @ weight.T
    if hidden.device.type == "cuda":  # without a copy of the weight in fp32
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return hidden.float() @ weight.float().T


@dataclass(frozen=True)
class HeadLogits:
    """Lazy logits, computed chunk by chunk and never materialised as a whole.

    hidden [n, H] and the output head's weight [vocabulary / TP, H] have one dtype, to which their
    product is rounded like a model's logits, unless it is `precise`. Takes no gradient. A head that
    is a function returns the weight whenever it is read, so that no logits keep it in memory.
    """

    hidden: Tensor
    head: Head
    precise: bool = field(default=False, kw_only=True)  # `model.head_precision: fp32`

    @property
    def weight(self) -> Tensor:
        """The output head's weight; use it before another head is read."""
        return self.head if isinstance(self.head, Tensor) else self.head()

    def rows(self, rows: slice) -> Tensor:
        """Return the logits of some rows, [rows, vocabulary / TP]."""
        return head_logits(self.hidden[rows], self.weight, self.precise)


@dataclass(frozen=True)
class KeptLogits:
    """The hidden states of a micro-batch, wherever they are, and the head that they need.

    They come back in the dtype that they had, rounded to the one that they were kept in.
    """

    read: Callable[[], Tensor]
    dtype: torch.dtype
    head: Head
    precise: bool

    def load(self) -> HeadLogits:
        """Return the logits with their hidden states on the device."""
        hidden = self.read().to(device()).to(self.dtype)
        return HeadLogits(hidden, self.head, precise=self.precise)


Logits = Tensor | HeadLogits


def logprobs(
    logits: Logits, targets: Tensor, temperature: float = 1.0, kept_sets: Tensor | None = None
) -> Tensor:
    """Return log softmax(logits / temperature) at the targets, int64 [n] or [n, K]; their shape.

    kept_sets, int64 [n, S] padded with -1, holds the ids that top-p or top-k sampling left in each
    row, over which the row is renormalised (the keep mask of DeepSeek-V3.2, arXiv 2512.02556).
    None, and a row of only -1, keep every id. A row's targets always count as kept: where rounding
    differs between engine and trainer the result is then finite and has a gradient, instead of the
    -inf that would end the run.

    Example: logits [[0, ln 3, ln 4]] have probabilities 1/8, 3/8 and 4/8. At target 1 the result is
    ln 3/8 = -.98; with kept_sets [[0, 1, -1]] it is ln 3/4 = -.29.

    Waits for: the tensor-parallel ranks of this stage, here and in every function of this file.
    Unblocked by: the same call on each, on the same rows.
    """
    columns = targets.unsqueeze(1) if targets.dim() == 1 else targets
    how = How(temperature, None if kept_sets is None else with_targets(kept_sets, columns))
    return _LogProbs.apply(*parts_of(logits), columns, how).reshape(targets.shape)


def with_targets(kept_sets: Tensor, targets: Tensor) -> Tensor:
    """Return kept sets [n, S + K] that hold their row's targets, int64 [n, K], too."""
    has_set = (kept_sets >= 0).any(1, keepdim=True)
    return torch.cat([kept_sets, targets.where(has_set, -1)], 1)


def entropy(logits: Logits, temperature: float = 1.0, kept_sets: Tensor | None = None) -> Tensor:
    """Return the entropy of softmax(logits / temperature) over `kept_sets`, in nats, [n].

    Example: logits [[0, ln 3]] have probabilities 1/4 and 3/4, and the entropy .56.
    """
    return _Entropy.apply(*parts_of(logits), How(temperature, kept_sets))


def kl(
    logits: Logits, other: Logits, temperature: float = 1.0, kept_sets: Tensor | None = None
) -> Tensor:
    """Return KL(softmax(logits / temperature) || softmax(other / temperature)) in nats, [n].

    Exact over the whole vocabulary, or over `kept_sets` (see logprobs), on which both are
    renormalised. For equal logits the value and both gradients are exactly 0. Dtypes may differ.
    With the student first this is the reverse KL of DeepSeek-V4's Eq. 29.

    Example: logits [[0, ln 3]] against [[0, 0]]: 1/4 ln 1/2 + 3/4 ln 3/2 = .13.
    """
    return _KL.apply(*parts_of(logits), *parts_of(other), How(temperature, kept_sets))


@torch.no_grad()
def top_k(logits: Logits, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids (int64) of the k most likely ids, both [n, k].

    Sorted by probability; ties by the lower id. Takes no gradient. Raises ValueError if the
    vocabulary has fewer than k ids.

    Example: the top 2 of logits [[0, ln 3, ln 4]] are [[ln 4/8, ln 3/8]] and the ids [[2, 1]].
    """
    tensor, lazy = parts_of(logits)
    size = _size(tensor, lazy)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if k > size * ranks:
        raise ValueError(f"top_k: k = {k} exceeds the vocabulary's {size * ranks} ids; lower k")
    partials = empty_wide(tensor, 2, len(tensor))
    largest, total = partials
    best = empty_wide(tensor, len(tensor), min(k, size))
    ids = torch.empty_like(best, dtype=torch.int64)
    for rows, x in chunks_of(tensor, lazy, How(temperature, None)):
        ids[rows] = _largest_columns(x, best.shape[1])
        best[rows] = x.gather(1, ids[rows])
        largest[rows] = subtract_maximum(x)
        total[rows] = x.exp_().sum(1)
    ids += parallel_state.get_tensor_model_parallel_rank() * size
    top, _, total = normaliser(*across_ranks(partials).unbind(1))
    best, ids = (torch.cat([*across_ranks(of_rank)], 1) for of_rank in (best, ids))
    # The sort is stable and ranks stand in the order of their ids: ties keep the lower id first.
    best, order = best.sort(dim=1, descending=True, stable=True)
    best = best[:, :k] - top.unsqueeze(1) - total.log().unsqueeze(1)
    return best, ids.gather(1, order[:, :k])


class How(NamedTuple):
    """The parameters of a pass over the rows."""

    temperature: float
    kept: Tensor | None


class _LogProbs(torch.autograd.Function):
    """The function x[target] - log sum exp x, with gradient g (1[target] - p) to x."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, lazy: HeadLogits | None, targets: Tensor, how: How
    ) -> Tensor:
        partials = empty_wide(logits, 2 + targets.shape[1], len(logits))
        largest, total, target_logits = partials[0], partials[1], partials[2:]
        columns, mine = own_columns(targets, _size(logits, lazy))
        for rows, x in chunks_of(logits, lazy, how):
            target_logits[:, rows] = x.gather(1, columns[rows]).where(mine[rows], 0).T
            largest[rows] = subtract_maximum(x)
            total[rows] = x.exp_().sum(1)
        by_rank = across_ranks(partials)
        top, _, total = normaliser(by_rank[:, 0], by_rank[:, 1])
        target_logits = by_rank[:, 2:].sum(0)
        ctx.save_for_backward(logits, targets, top, total)
        ctx.how = how
        return (target_logits - top - total.log()).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, top, total = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        columns, mine = own_columns(targets, logits.shape[1])
        upstream = upstream / ctx.how.temperature
        factor = (-upstream.sum(1) / total).unsqueeze(1)
        upstream = upstream.where(mine, 0)
        for rows, x in chunks_of(logits, None, ctx.how):
            relative_to(x, top[rows]).exp_().mul_(factor[rows])
            gradient[rows] = x.scatter_add_(1, columns[rows], upstream[rows])
        return gradient, None, None, None


class _Entropy(torch.autograd.Function):
    """The function log sum e - mean, mean = sum p (x - max x); gradient -g p (x - max x - mean)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, lazy: HeadLogits | None, how: How) -> Tensor:
        partials = empty_wide(logits, 3, len(logits))
        largest, total, moment = partials
        for rows, x in chunks_of(logits, lazy, how):
            largest[rows] = subtract_maximum(x)
            e = x.exp()
            total[rows], moment[rows] = e.sum(1), x.mul_(e).sum(1)
        largest, total, moment = across_ranks(partials).unbind(1)
        top, moved, whole = normaliser(largest, total)
        mean = ((moment + total * moved) * moved.exp()).sum(0) / whole
        ctx.save_for_backward(logits, top, whole, mean)
        ctx.how = how
        return whole.log() - mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, whole, mean = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        factor = (-upstream / ctx.how.temperature / whole).unsqueeze(1)
        mean = mean.unsqueeze(1)
        for rows, x in chunks_of(logits, None, ctx.how):
            e = relative_to(x, top[rows]).exp()
            gradient[rows] = x.sub_(mean[rows]).mul_(e).mul_(factor[rows])
        return gradient, None, None


class _KL(torch.autograd.Function):
    """The function mean + log(sum e_y / sum e): mean = sum p d, d = (x - max x) - (y - max y).

    The gradient to x is g p (d - mean), that is g p (log p - log q - KL); to y it is g (q - p).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        lazy: HeadLogits | None,
        other: Tensor,
        other_lazy: HeadLogits | None,
        how: How,
    ) -> Tensor:
        partials = empty_wide(logits, 5, len(logits))
        largest, total, moment, largest_y, total_y = partials
        xs, ys = chunks_of(logits, lazy, how), chunks_of(other, other_lazy, how)
        for (rows, x), (_, y) in zip(xs, ys, strict=True):
            largest[rows], largest_y[rows] = subtract_maximum(x), subtract_maximum(y)
            e, d, e_y = _compare(x, y)
            total[rows], total_y[rows], moment[rows] = e.sum(1), e_y.sum(1), d.mul_(e).sum(1)
        largest, total, moment, largest_y, total_y = across_ranks(partials).unbind(1)
        top, moved, whole = normaliser(largest, total)
        top_y, moved_y, whole_y = normaliser(largest_y, total_y)
        mean = ((moment + total * (moved - moved_y)) * moved.exp()).sum(0) / whole
        sums = (top, top_y, whole, whole_y, mean)
        ctx.save_for_backward(logits, other, *sums)
        ctx.lazy, ctx.how = (lazy, other_lazy), how
        return mean + (whole_y / whole).log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, other, top, top_y, whole, whole_y, mean = ctx.saved_tensors
        lazy, other_lazy = ctx.lazy
        how: How = ctx.how
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        gradient_y = torch.empty_like(other) if ctx.needs_input_grad[2] else None
        factor = (upstream / how.temperature / whole).unsqueeze(1)
        factor_y = (upstream / how.temperature / whole_y).unsqueeze(1)
        mean = mean.unsqueeze(1)
        xs, ys = chunks_of(logits, lazy, how), chunks_of(other, other_lazy, how)
        for (rows, x), (_, y) in zip(xs, ys, strict=True):
            e, d, e_y = _compare(relative_to(x, top[rows]), relative_to(y, top_y[rows]))
            e_scaled = e.mul_(factor[rows])
            if gradient is not None:
                gradient[rows] = d.sub_(mean[rows]).mul_(e_scaled)
            if gradient_y is not None:
                gradient_y[rows] = e_y.mul_(factor_y[rows]).sub_(e_scaled)
        return gradient, None, gradient_y, None, None


def parts_of(logits: Logits) -> tuple[Tensor, HeadLogits | None]:
    """Return (logits, None), or (hidden states, the lazy logits), which take no gradient."""
    if isinstance(logits, HeadLogits):
        return logits.hidden.detach(), logits
    return logits, None


def _size(logits: Tensor, lazy: HeadLogits | None) -> int:
    """Return the number of vocabulary ids on this rank."""
    return logits.shape[1] if lazy is None else lazy.weight.shape[0]


def chunks_of(logits: Tensor, lazy: HeadLogits | None, how: How) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of rows with their x, LOWEST outside the kept sets; callers may overwrite x."""
    size = _size(logits, lazy)
    step = max(1, LOSS_CHUNK_BYTES[logits.device.type] // (4 * size))
    # Reused by every chunk: a caller must be done with x before it asks for the next.
    buffer = empty_wide(logits, min(step, len(logits)), size)
    for start in range(0, len(logits), step):
        rows = slice(start, min(start + step, len(logits)))
        x = buffer[: rows.stop - start]
        x.copy_(logits[rows] if lazy is None else lazy.rows(rows))
        if how.temperature != 1.0:
            x.div_(how.temperature)
        if how.kept is not None:
            _drop_others(x, how.kept[rows])
        yield rows, x


def _drop_others(x: Tensor, kept_sets: Tensor) -> None:
    """Set ids outside their row's kept set, if it has one, to LOWEST."""
    size = x.shape[1]
    columns, mine = own_columns(kept_sets, size)
    # The extra column absorbs the kept ids of other ranks and the padding.
    dropped = torch.ones((len(x), size + 1), dtype=torch.bool, device=x.device)
    dropped.scatter_(1, columns.where(mine, size), False)
    dropped &= (kept_sets >= 0).any(1, keepdim=True)
    x.masked_fill_(dropped[:, :size], LOWEST)


def own_columns(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the ids' columns in this rank's part, clamped, and a mask of the ids in it."""
    columns = ids - parallel_state.get_tensor_model_parallel_rank() * size
    return columns.clamp(0, size - 1), (columns >= 0) & (columns < size)


def subtract_maximum(x: Tensor) -> Tensor:
    """Subtract each row's maximum in place and return the maxima, [rows]."""
    largest = x.amax(1).clamp_(min=LOWEST)
    relative_to(x, largest)
    return largest


def relative_to(x: Tensor, top: Tensor) -> Tensor:
    """Subtract `top` from the rows in place; logits of -inf become LOWEST."""
    return x.sub_(top.unsqueeze(1)).clamp_(min=LOWEST)


def _compare(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp x, x - y and exp y of shifted rows; the last two overwrite x and y."""
    e = x.exp()
    return e, x.sub_(y), y.exp_()


def _largest_columns(x: Tensor, k: int) -> Tensor:
    """Return the columns of each row's k largest, int64 [rows, k]; ties by the lower column.

    torch.topk breaks ties arbitrarily, and bf16 logits have many.
    """
    last = x.topk(k).values[:, -1:]
    # Values above the k-th are in; of the values equal to it, the lowest columns fill the rest.
    # fp32 counts exactly up to 16.7 million columns.
    lower_first = torch.arange(0, -x.shape[1], -1, dtype=x.dtype, device=x.device)
    priority = torch.where(x > last, 1.0, lower_first.where(x == last, -torch.inf))
    columns = priority.topk(k).indices.sort(1).values
    order = x.gather(1, columns).sort(dim=1, descending=True, stable=True).indices
    return columns.gather(1, order)


def empty_wide(logits: Tensor, *shape: int) -> Tensor:
    """Return an empty tensor to compute in: fp64 for fp64 (tests use it), else fp32."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(shape, dtype=wide)


def across_ranks(tensor: Tensor) -> Tensor:
    """Gather a tensor from the tensor-parallel ranks, [TP, ...].

    Sums over ranks are then computed locally, in rank order. An all-reduce adds the ranks in
    different orders for different elements, so that the KL of equal logits would not be 0.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return tensor.unsqueeze(0)
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather([*gathered], tensor, group=group)
    return gathered


def normaliser(largest: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maximum [n], each rank's maximum minus it [TP, n], and the sum of e [n]."""
    top = largest.amax(0)
    moved = largest - top
    return top, moved, (total * moved.exp()).sum(0)
