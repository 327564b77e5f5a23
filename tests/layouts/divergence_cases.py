"""The cases of divergences and extrapolated targets, compared with fp64 over the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.layouts.vocabulary_cases import (
    ROWS,
    SIZE,
    Largest,
    calls,
    distance,
    draw,
    own,
    set_chunks,
)

NAMES = ["jsd", "rest", "everywhere", "nucleus"]
BETA, FACTOR, TOP_P = 0.3, 1.25, 0.7


def models(drawn: dict[str, Any]) -> dict[str, Tensor]:
    """Return whole logits of student, teacher and start; the last two are products, and exact."""
    teacher = drawn["hidden"] @ drawn["head"].T
    return {"student": drawn["first"], "teacher": teacher, "start": teacher.flip(1).div(2).round()}


def lazily(whole: Tensor) -> Any:
    """Return this rank's part of logits as hidden states and a head."""
    from parallel.model.vocabulary import HeadLogits

    unit = torch.eye(whole.shape[1], dtype=whole.dtype)
    return HeadLogits(whole, own(unit).T.contiguous())


def computed(name: str, student: Tensor, whole: dict[str, Tensor]) -> Tensor:
    from parallel.model import divergences, vocabulary

    teacher, start = lazily(whole["teacher"]), lazily(whole["start"])
    if name == "jsd":
        return divergences.jsd(student, teacher, BETA)
    if name == "rest":
        return divergences.log_rest(student, excluded(len(student)))
    top_p = TOP_P if name == "nucleus" else None
    return vocabulary.kl(student, divergences.extrapolated(teacher, start, FACTOR, top_p))


def excluded(rows: int) -> Tensor:
    """Return ids of every row, of all ranks' parts of the vocabulary."""
    return torch.arange(rows).unsqueeze(1) + torch.tensor([[0, 7, 17]])


def expected(name: str, whole: dict[str, Tensor]) -> Tensor:
    log_p, log_q, log_b = (whole[each].double().log_softmax(-1) for each in whole)
    p, q = log_p.exp(), log_q.exp()
    if name == "jsd":
        log_m = torch.logaddexp(log_q + math.log(BETA), log_p + math.log1p(-BETA))
        theirs, ours = q * (log_q - log_m), p * (log_p - log_m)
        return (BETA * theirs + (1 - BETA) * ours).sum(1)
    if name == "rest":
        return log_p.scatter(1, excluded(len(log_p)), -torch.inf).logsumexp(1)
    learned = log_q - log_b
    if name == "nucleus":
        order = q.sort(dim=1, descending=True, stable=True).indices
        ranked = q.gather(1, order)
        held = (ranked.cumsum(1) - ranked < TOP_P).to(q.dtype)
        inside = torch.zeros_like(q).scatter(1, order, held)
        # Equal probabilities are in it together.
        least = q.masked_fill(inside == 0, 2.0).amin(1, keepdim=True)
        learned = learned.where(q >= least, 0.0)
    log_t = (log_q + (FACTOR - 1) * learned).log_softmax(-1)
    return (p * (log_p - log_t)).sum(1)


def errors(name: str, dtype: torch.dtype, rows: int, scale: float = 3.0) -> dict[str, Any]:
    """Return the values, and the errors of values and gradients, relative above 1."""
    drawn = draw(scale, dtype)
    whole = {key: each.to(dtype) for key, each in models(drawn).items()}
    student = own(whole["student"]).requires_grad_()
    truth_of = {**whole, "student": whole["student"].double().clone().requires_grad_()}
    set_chunks(rows)
    values = computed(name, student, whole)
    truth = expected(name, truth_of)
    upstream = drawn["upstream"][:, 0]
    (values * upstream).sum().backward()
    (truth * upstream).sum().backward()
    return {
        "values": values.detach().numpy(),
        "value": distance(values, truth),
        "gradient": distance(student.grad, own(truth_of["student"].grad)),
        "dtypes": {values.dtype, student.grad.dtype},
    }


def gradcheck(name: str) -> bool:
    whole = models(draw())
    set_chunks(2)
    student = whole["student"].clone().requires_grad_()
    return torch.autograd.gradcheck(lambda x: computed(name, x, whole), student)


def equal_sets(dtype: torch.dtype) -> list[bool]:
    """Return true if the JSD and its gradient of equal logits are exactly 0."""
    from parallel.model.divergences import jsd

    whole = models(draw(dtype=dtype))["teacher"]
    student = own(whole).requires_grad_()
    set_chunks(2)
    value = jsd(student, lazily(whole), BETA)
    value.sum().backward()
    return [not found.any() for found in (value, student.grad)]


def no_rows() -> list[tuple[int, ...]]:
    whole = {key: each[:0] for key, each in models(draw()).items()}
    shapes = []
    for name in NAMES:
        student = own(whole["student"]).requires_grad_()
        value = computed(name, student, whole)
        value.sum().backward()
        shapes += [tuple(value.shape), tuple(student.grad.shape)]
    return shapes


def padded() -> list[float]:
    """Return the change of value and gradient by vocabulary padding of -inf."""
    found = []
    for name in NAMES:
        results = []
        for padding in (False, True):
            whole = models(draw())
            whole = {key: each[:, : SIZE - 8].clone() for key, each in whole.items()}
            if padding:
                ends = torch.full((ROWS, 8), -torch.inf, dtype=torch.float64)
                whole = {key: torch.cat([each, ends], 1) for key, each in whole.items()}
            student = whole["student"].requires_grad_()
            value = _whole_vocabulary(name, student, whole)
            value.sum().backward()
            results.append((value, student.grad[:, : SIZE - 8]))
        found += [distance(*pair) for pair in zip(*results, strict=True)]
    return found


def _whole_vocabulary(name: str, student: Tensor, whole: dict[str, Tensor]) -> Tensor:
    """Return `computed` with teachers whose -inf a product would turn to NaN."""
    from unittest import mock

    from parallel.model.vocabulary import HeadLogits

    with mock.patch.object(HeadLogits, "rows", lambda self, rows: self.hidden[rows]):
        return computed(name, student, whole)


def collectives(rows: int) -> dict[str, list[str]]:
    set_chunks(rows)
    whole, used = models(draw()), {}
    for name in NAMES:
        student = own(whole["student"]).requires_grad_()
        with calls() as seen:
            computed(name, student, whole).sum().backward()
        used[name] = seen
    return used


def largest_temporaries(rows: int) -> dict[str, int]:
    """Return the largest fp32 temporaries for bf16 logits and chunks of `rows` rows."""
    from parallel.model import divergences, vocabulary
    from parallel.model.vocabulary import HeadLogits

    drawn = draw(dtype=torch.bfloat16, size=40 * SIZE)
    student = own(drawn["first"]).requires_grad_()
    set_chunks(rows, student.shape[1])
    teacher = HeadLogits(drawn["hidden"], own(drawn["head"].T).T)
    start = HeadLogits(drawn["hidden"].flip(1), own(drawn["head"].T).T)
    used = {}
    with Largest() as seen:
        divergences.jsd(student, teacher, BETA).sum().backward()
    used["jsd"] = seen.elements
    with Largest() as seen:
        target = divergences.extrapolated(teacher, start, FACTOR)
        vocabulary.kl(student, target).sum().backward()
    used["everywhere"] = seen.elements
    return used
