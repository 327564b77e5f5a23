"""Divergences of vocabulary-parallel logits beside the KL, and targets beyond a teacher.

As `parallel.model.vocabulary`, whose conventions and helpers these functions share: rows are
processed in chunks, no [n, vocabulary] tensor of full precision exists, and ranks exchange only
sums by row. Temperature is 1 and the whole vocabulary counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.model.vocabulary import (
    LOWEST,
    HeadLogits,
    How,
    Logits,
    across_ranks,
    chunks_of,
    empty_wide,
    logprobs,
    normaliser,
    own_columns,
    parts_of,
    relative_to,
    subtract_maximum,
    top_k,
)

Parts = tuple[Tensor, HeadLogits | None]  # of `parts_of`
WHOLE = How(1.0, None)
# Ids that a nucleus has at most: one of a row that is nearly flat would be the whole vocabulary.
MOST_IN_NUCLEUS = 1024
NUCLEUS_ROWS = 256  # whose most likely ids are in memory at once


def jsd(student: Logits, teacher: Logits, beta: float) -> Tensor:
    """Return beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S, in nats, [n].

    0 < beta < 1. The gradient is to the student alone. For equal logits value and gradient are
    exactly 0. Over beta it tends to KL(T || S) as beta tends to 0, and over 1 - beta to
    KL(S || T) as beta tends to 1. Source: GKD, arXiv 2306.13649.

    Example: S = (1/4, 3/4), T = (1/2, 1/2) and beta 1/2: M = (3/8, 5/8), KL(T || M) = .032 and
    KL(S || M) = .035, so .034.
    """
    return _JSD.apply(*parts_of(student), *parts_of(teacher), beta)


def log_rest(logits: Logits, ids: Tensor) -> Tensor:
    """Return the log-probability of all ids but `ids`, int64 [n, k], together, [n].

    Summed directly: 1 less the others' probabilities would be rounding where a model is sure.
    Far below any logarithm where `ids` is the whole vocabulary.

    Example: of probabilities (1/8, 3/8, 4/8) and ids [[2]], ln (1/8 + 3/8) = -.69.
    """
    return _LogRest.apply(*parts_of(logits), ids)


@torch.no_grad()
def extrapolated(
    teacher: HeadLogits, start: HeadLogits, factor: float, top_p: float | None = None
) -> HeadLogits:
    """Return the logits factor * teacher + (1 - factor) * start, up to a constant by row; lazy.

    With `top_p` only in each row's nucleus of the teacher, the fewest ids with that much
    probability, and at most MOST_IN_NUCLEUS of them; elsewhere the teacher's own. What is
    extrapolated there are log-probabilities, since logits have a constant of their own.
    Source: ExOPD, arXiv 2602.12125, whose sampled advantage is the gradient's estimate.

    Example: a teacher's logit of 2 where the start's is 1, and factor 1.5, give 1.5 x 2 - .5 x 1 =
    2.5.
    """
    precise = teacher.precise
    if top_p is None:
        return _Extrapolated(teacher.hidden, teacher.head, start, factor, precise=precise)
    whole = log_normaliser(teacher)
    shift = whole - log_normaliser(start)
    floor = nucleus_floor(teacher, top_p) + whole
    hidden_and_head = teacher.hidden, teacher.head
    return _Extrapolated(*hidden_and_head, start, factor, shift, floor, precise=precise)


@torch.no_grad()
def nucleus_floor(logits: HeadLogits, top_p: float) -> Tensor:
    """Return the log-probability that separates each row's nucleus from the other ids, [n].

    It is half-way to the next id, so that rounding moves none across it; below all ids where the
    nucleus is the whole vocabulary.

    Example: probabilities .6, .3 and .1 with top_p .8 have the nucleus (.6, .3), and the floor is
    (ln .3 + ln .1) / 2 = -1.75.
    """
    size = logits.weight.shape[0] * parallel_state.get_tensor_model_parallel_world_size()
    most = min(MOST_IN_NUCLEUS, size)
    floors = empty_wide(logits.hidden, len(logits.hidden))
    for start in range(0, len(floors), NUCLEUS_ROWS):
        rows = slice(start, start + NUCLEUS_ROWS)
        best, _ = top_k(replace(logits, hidden=logits.hidden[rows]), min(most + 1, size))
        inside = prefix_sums(best.exp()) < top_p  # the first id always is
        count = inside.sum(1, keepdim=True).clamp(max=most)
        best = torch.cat([best, torch.full_like(best[:, :1], LOWEST)], 1)
        floors[rows] = (best.gather(1, count - 1) + best.gather(1, count)).squeeze(1) / 2
    return floors


@torch.no_grad()
def in_nucleus(logits: HeadLogits, targets: Tensor, top_p: float) -> Tensor:
    """Return 1 for the targets, int64 [n], in their row's nucleus, else 0; fp32 [n]."""
    log_p = logprobs(logits, targets)
    return (log_p > nucleus_floor(logits, top_p)).to(log_p.dtype)


def prefix_sums(values: Tensor) -> Tensor:
    """Return the sum of the values before each, along the last dimension; 0 for the first.

    torch.cumsum has no deterministic kernel for CUDA. This doubles the span log2(N) times.

    Example:

        >>> prefix_sums(torch.tensor([1.0, 2.0, 4.0]))
        tensor([0., 1., 3.])
    """
    total, span = torch.zeros_like(values), 1
    total[..., 1:] = values[..., :-1]
    while span < values.shape[-1]:
        before = total.clone()
        total[..., span:] += before[..., :-span]
        span *= 2
    return total


@torch.no_grad()
def log_normaliser(logits: Logits) -> Tensor:
    """Return log sum exp of each row's logits, [n]."""
    top, log_whole = _normalisers(*parts_of(logits))
    return top + log_whole


@dataclass(frozen=True)
class _Extrapolated(HeadLogits):
    """The teacher's logits (`hidden`, `head`) plus (factor - 1) of what it learned from `start`.

    shift and floor [n]: the difference of the two normalisers, and the teacher's logit below which
    nothing is added.
    """

    start: HeadLogits
    factor: float
    shift: Tensor | None = None
    floor: Tensor | None = None

    def rows(self, rows: slice) -> Tensor:
        logits = self._wide(super().rows(rows))
        learned = logits - self._wide(self.start.rows(rows))
        if self.shift is not None and self.floor is not None:
            learned.sub_(self.shift[rows].unsqueeze(1))
            learned.masked_fill_(logits < self.floor[rows].unsqueeze(1), 0.0)
        return logits.add_(learned, alpha=self.factor - 1)

    def _wide(self, logits: Tensor) -> Tensor:
        """Return logits in the precision of the loss; the padding's -inf has no difference."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return logits.to(wide).clamp(min=LOWEST)


class _JSD(torch.autograd.Function):
    """The function beta sum q log(q / m) + (1 - beta) sum p log(p / m), p the student's, q theirs.

    The gradient to the student's logits is g (1 - beta) p (log(p / m) - KL(p || m)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        student_lazy: HeadLogits | None,
        teacher: Tensor,
        teacher_lazy: HeadLogits | None,
        beta: float,
    ) -> Tensor:
        ours, theirs = (student, student_lazy), (teacher, teacher_lazy)
        normalisers = (*_normalisers(*ours), *_normalisers(*theirs))
        partials = empty_wide(student, 2, len(student))
        for rows, log_p, log_q in _log_probabilities(ours, theirs, normalisers):
            over_p, over_q = _log_ratios_to_mixture(log_p, log_q, beta)
            partials[0, rows] = over_p.mul_(log_p.exp_()).sum(1)
            partials[1, rows] = over_q.mul_(log_q.exp_()).sum(1)
        of_student, of_teacher = across_ranks(partials).sum(0)
        ctx.save_for_backward(student, teacher, of_student, *normalisers)
        ctx.lazy, ctx.beta = teacher_lazy, beta
        return beta * of_teacher + (1 - beta) * of_student

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, of_student, *normalisers = ctx.saved_tensors
        gradient = torch.empty_like(student)
        factor = (upstream * (1 - ctx.beta)).unsqueeze(1)
        ours, theirs = (student, None), (teacher, ctx.lazy)
        for rows, log_p, log_q in _log_probabilities(ours, theirs, normalisers):
            over_p, _ = _log_ratios_to_mixture(log_p, log_q, ctx.beta)
            over_p.sub_(of_student[rows].unsqueeze(1))
            gradient[rows] = over_p.mul_(log_p.exp_()).mul_(factor[rows])
        return gradient, None, None, None, None


class _LogRest(torch.autograd.Function):
    """The function log(R / Z), R the sum of e over the rest and Z over all ids.

    The gradient is g (r - p), r the distribution over the rest.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, lazy: HeadLogits | None, ids: Tensor) -> Tensor:
        partials = empty_wide(logits, 4, len(logits))
        for rows, x in chunks_of(logits, lazy, WHOLE):
            both = _with_rest(x, ids[rows])
            for largest, total, chunk in zip(partials[:2], partials[2:], both, strict=True):
                largest[rows] = subtract_maximum(chunk)
                total[rows] = chunk.exp_().sum(1)
        largest, largest_rest, total, total_rest = across_ranks(partials).unbind(1)
        top, _, whole = normaliser(largest, total)
        top_rest, _, whole_rest = normaliser(largest_rest, total_rest)
        ctx.save_for_backward(logits, ids, top, top_rest, whole, whole_rest)
        return (top_rest - top) + (whole_rest.log() - whole.log())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, top, top_rest, whole, whole_rest = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        factor, factor_rest = (-upstream / whole).unsqueeze(1), (upstream / whole_rest).unsqueeze(1)
        for rows, x in chunks_of(logits, None, WHOLE):
            every, remaining = _with_rest(x, ids[rows])
            relative_to(remaining, top_rest[rows]).exp_().mul_(factor_rest[rows])
            relative_to(every, top[rows]).exp_().mul_(factor[rows])
            gradient[rows] = remaining.add_(every)
        return gradient, None, None


def _with_rest(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk of logits, and a copy with LOWEST at the `ids`."""
    size = x.shape[1]
    columns, mine = own_columns(ids, size)
    # The extra column absorbs the ids of other ranks.
    dropped = torch.zeros((len(x), size + 1), dtype=torch.bool, device=x.device)
    dropped.scatter_(1, columns.where(mine, size), True)
    return x, x.masked_fill(dropped[:, :size], LOWEST)


def _log_probabilities(
    ours: Parts, theirs: Parts, normalisers: Sequence[Tensor]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield chunks of rows with both models' log-probabilities; callers may overwrite them."""
    top, log_whole, top_y, log_whole_y = (row_values.unsqueeze(1) for row_values in normalisers)
    xs, ys = chunks_of(*ours, WHOLE), chunks_of(*theirs, WHOLE)
    for (rows, x), (_, y) in zip(xs, ys, strict=True):
        # The maximum first: a logit of 1e5 less it is exact, and their logarithms are small.
        relative_to(x, top[rows, 0]).sub_(log_whole[rows])
        relative_to(y, top_y[rows, 0]).sub_(log_whole_y[rows])
        yield rows, x, y


def _log_ratios_to_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return log(p / m) and log(q / m), m = beta q + (1 - beta) p; both exactly 0 where p = q.

    With d = log q - log p, m / p is 1 + beta (e^d - 1), and m / q is 1 + (1 - beta) (e^-d - 1): of
    the two only the one whose exponential cannot overflow is computed.
    """
    d = log_q - log_p
    weight = torch.full_like(d, beta).masked_fill_(d > 0, 1 - beta)
    logs = d.abs().neg_().expm1_().mul_(weight).log1p_()
    return -(logs + d.clamp(min=0)), -(logs - d.clamp(max=0))


def _normalisers(logits: Tensor, lazy: HeadLogits | None) -> tuple[Tensor, Tensor]:
    """Return each row's maximum and the log of its sum of e, [n] both."""
    partials = empty_wide(logits, 2, len(logits))
    for rows, x in chunks_of(logits, lazy, WHOLE):
        partials[0, rows] = subtract_maximum(x)
        partials[1, rows] = x.exp_().sum(1)
    top, _, whole = normaliser(*across_ranks(partials).unbind(1))
    return top, whole.log()
