"""The cases of vocabulary-parallel functions, compared with fp64 over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ["logprobs", "logprobs_many", "entropy", "kl", "kl_lazy"]
ROWS, SIZE, HIDDEN = 7, 24, 5


def own(whole: Tensor) -> Tensor:
    """Return this rank's part of the vocabulary."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(ranks, -1)[parallel_state.get_tensor_model_parallel_rank()].clone()


def draw(
    scale: float = 3.0, dtype: torch.dtype = torch.float64, size: int = SIZE
) -> dict[str, Any]:
    """Return two sets of whole logits, targets and kept sets, equal on every rank."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    kept = torch.randint(0, size, (ROWS, 9), generator=random)
    kept[0, 4:] = -1
    kept[1] = -1  # a row without a set
    targets = torch.randint(0, size, (ROWS, 3), generator=random)
    targets[2:, 0] = kept[2:, 0]
    targets[0] = torch.tensor([i for i in range(size) if i not in kept[0]][:3])  # all outside it
    return {
        "first": (normal(ROWS, size) * scale).to(dtype),
        "second": (normal(ROWS, size) * scale).to(dtype),
        # Whole numbers, whose products are exact in whatever order they are summed.
        "hidden": normal(ROWS, HIDDEN).round().to(dtype),
        "head": (normal(size, HIDDEN) * scale).round().to(dtype),
        "upstream": normal(ROWS, 3),
        "targets": targets,
        "kept": kept,
    }


def expected_log_softmax(
    logits: Tensor, temperature: float, kept: Tensor | None, also: Tensor | None = None
) -> Tensor:
    """Return log-softmax in fp64 over the whole vocabulary; -inf for dropped ids."""
    x = logits.double() / temperature
    if kept is None:
        return x.log_softmax(-1)
    allowed = torch.zeros(x.shape, dtype=torch.bool)
    for row, ids in enumerate(kept.tolist()):
        ids = [i for i in ids if i >= 0]
        allowed[row, ids + also[row].tolist() if ids and also is not None else ids] = True
        allowed[row] |= not ids
    return x.masked_fill(~allowed, -torch.inf).log_softmax(-1)


def expected(name: str, drawn: dict[str, Any], temperature: float, kept: Tensor | None) -> Tensor:
    if name.startswith("logprobs"):
        targets = drawn["targets"] if name == "logprobs_many" else drawn["targets"][:, :1]
        found = expected_log_softmax(drawn["first"], temperature, kept, targets).gather(1, targets)
        return found if name == "logprobs_many" else found[:, 0]
    log_p = expected_log_softmax(drawn["first"], temperature, kept)
    held = log_p.isfinite()
    p, log_p = log_p.exp(), log_p.masked_fill(~held, 0)
    if name == "entropy":
        return -(p * log_p).sum(1)
    second = drawn["hidden"] @ drawn["head"].T if name == "kl_lazy" else drawn["second"]
    log_q = expected_log_softmax(second, temperature, kept).masked_fill(~held, 0)
    return (p * (log_p - log_q)).sum(1)


def set_chunks(rows: int, size: int = SIZE) -> None:
    """Make later calls use chunks of `rows` rows of a whole vocabulary; under TP they have more."""
    from parallel.model import vocabulary

    vocabulary.LOSS_CHUNK_BYTES = dict.fromkeys(("cpu", "cuda"), rows * 4 * size)


def computed(name: str, drawn: dict[str, Any], *how: Any) -> Tensor:
    """Return Braid's result; `drawn` holds this rank's logits and head."""
    from parallel.model import vocabulary

    if name == "logprobs":
        return vocabulary.logprobs(drawn["first"], drawn["targets"][:, 0], *how)
    if name == "logprobs_many":
        return vocabulary.logprobs(drawn["first"], drawn["targets"], *how)
    if name == "entropy":
        return vocabulary.entropy(drawn["first"], *how)
    second = drawn["second"]
    if name == "kl_lazy":
        second = vocabulary.HeadLogits(drawn["hidden"], drawn["head"])
    return vocabulary.kl(drawn["first"], second, *how)


def parts(drawn: dict[str, Any]) -> dict[str, Any]:
    """Return `drawn` with this rank's part of the logits and the head."""
    held = {name: own(drawn[name]).requires_grad_() for name in ("first", "second")}
    return {**drawn, **held, "head": own(drawn["head"].T).T}


def errors(
    name: str,
    dtype: torch.dtype,
    temperature: float,
    masked: bool,
    rows: int,
    scale: float = 3.0,
    shift: float = 0.0,
) -> dict[str, Any]:
    """Return the values, and the errors of values and gradients, relative above 1."""
    drawn = draw(scale, dtype)
    drawn["first"] -= shift
    drawn["second"] += shift
    kept = drawn["kept"] if masked else None
    mine = parts(drawn)
    whole = {
        **drawn,
        **{name: drawn[name].clone().requires_grad_() for name in ("first", "second")},
    }
    set_chunks(rows)
    values = computed(name, mine, temperature, kept)
    truth = expected(name, whole, temperature, kept)
    upstream = drawn["upstream"] if values.dim() == 2 else drawn["upstream"][:, 0]
    (values * upstream).sum().backward()
    (truth * upstream).sum().backward()
    trained = [held for held in ("first", "second") if whole[held].grad is not None]
    gradients = {held: distance(mine[held].grad, own(whole[held].grad)) for held in trained}
    return {
        "values": values.detach().numpy(),
        "value": distance(values, truth),
        "gradients": gradients,
        "dtypes": {values.dtype, *(mine[held].grad.dtype for held in trained)},
    }


def distance(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    truth = truth.detach().double()
    return float(((found.detach().double() - truth).abs() / truth.abs().clamp(min=1)).max())


def gradcheck(name: str, masked: bool) -> bool:
    drawn = draw()
    kept = drawn["kept"] if masked else None

    def function(first: Tensor, second: Tensor) -> Tensor:
        held = {**drawn, "first": first, "second": second}
        return computed(name, held, 0.7, kept)

    set_chunks(2)
    logits = [drawn[held].requires_grad_() for held in ("first", "second")]
    return torch.autograd.gradcheck(function, logits)


def likeliest(
    k: int, dtype: torch.dtype, tied: bool, lazy: bool, rows: int
) -> tuple[np.ndarray, np.ndarray, float, bool]:
    """Return log-probabilities, ids, the error of the former, and true if ids sort stably."""
    from parallel.model import vocabulary

    drawn = draw(dtype=dtype)
    whole = drawn["first"].round() if tied else drawn["first"]
    logits: vocabulary.Logits = own(whole)
    if lazy:
        whole = drawn["hidden"] @ drawn["head"].T
        logits = vocabulary.HeadLogits(drawn["hidden"], own(drawn["head"].T).T)
    set_chunks(rows)
    found, ids = vocabulary.top_k(logits, k, 0.7)
    order = whole.double().sort(dim=1, descending=True, stable=True).indices[:, :k]
    truth = expected_log_softmax(whole, 0.7, None).gather(1, order)
    return found.numpy(), ids.numpy(), distance(found, truth), torch.equal(ids, order)


def too_many() -> str:
    from parallel.model import vocabulary

    try:
        vocabulary.top_k(own(draw()["first"]), SIZE + 1)
    except ValueError as error:
        return str(error)
    return ""


def divergences(p: list[float], q: list[float]) -> dict[str, Any]:
    """Return vector 6; a fourth id, not kept, lets four ranks share a vocabulary of three."""
    from parallel.model import vocabulary

    kept = torch.tensor([[0, 1, 2]])

    def logits(probabilities: list[float]) -> Tensor:
        return own(torch.tensor([[*probabilities, 0.4]], dtype=torch.float64).log())

    student, teacher = logits(p).requires_grad_(), logits(q)
    middle = logits([(a + b) / 2 for a, b in zip(p, q, strict=True)])
    reverse = vocabulary.kl(student, teacher, kept_sets=kept)
    reverse.sum().backward()
    return {
        "reverse": reverse.item(),
        "forward": vocabulary.kl(teacher, student, kept_sets=kept).item(),
        "jsd": sum(vocabulary.kl(x, middle, kept_sets=kept).item() / 2 for x in (student, teacher)),
        "gradient": student.grad[0].tolist(),
    }


def top_two(p: list[float], q: list[float]) -> tuple[float, float]:
    """Return the top-2 value of vector 6, with and without its correction."""
    from parallel.model import vocabulary

    # An id as good as impossible makes the vocabulary divisible and changes no digit.
    student, teacher = (own(torch.tensor([[*x, 1e-12]], dtype=torch.float64).log()) for x in (p, q))
    log_t, ids = vocabulary.top_k(teacher, 2)
    log_s = vocabulary.logprobs(student, ids)
    plain = log_s.exp() * (log_s - log_t)
    return float((plain - log_s.exp() + log_t.exp()).sum()), float(plain.sum())


def keep_mask(p: list[float], kept: list[int]) -> list[float]:
    """Return vector 10: log p of every id, each the target of one row, and the raw log p."""
    from parallel.model import vocabulary

    logits = own(torch.tensor([p] * len(p), dtype=torch.float64).log())
    targets = torch.arange(len(p))
    sets = torch.tensor([[*kept, -1]] * len(p))
    found = vocabulary.logprobs(logits, targets, kept_sets=sets)
    return [*found.tolist(), *vocabulary.logprobs(logits, targets).tolist()]


def equal_sets(dtype: torch.dtype, masked: bool) -> list[bool]:
    """Return true if KL and both gradients of equal logits are exactly 0, also lazily."""
    from parallel.model import vocabulary

    drawn = draw(dtype=dtype)
    kept = drawn["kept"] if masked else None
    first, second = (own(drawn["first"]).requires_grad_() for _ in range(2))
    set_chunks(2)
    value = vocabulary.kl(first, second, 0.7, kept)
    value.sum().backward()
    lazy = vocabulary.HeadLogits(drawn["hidden"], own(drawn["head"].T).T)
    lazily = vocabulary.kl(lazy, lazy, 0.7, kept)
    return [not found.any() for found in (value, first.grad, second.grad, lazily)]


def no_rows() -> list[tuple[int, ...]]:
    """Return the shapes of the results for no rows."""
    from parallel.model import vocabulary

    drawn = {name: value[:0] if name != "head" else value for name, value in draw().items()}
    mine = parts(drawn)
    found = [computed(name, mine, 0.7, drawn["kept"]) for name in NAMES]
    sum(value.sum() for value in found).backward()
    shapes = [*found, mine["first"].grad, *vocabulary.top_k(mine["first"], 2)]
    return [tuple(value.shape) for value in shapes]


def infinite() -> list[bool]:
    """Return true if vocabulary padding of -inf changes nothing and NaN is not hidden."""
    from parallel.model import vocabulary

    drawn = draw()
    padded = {**drawn, "kept": None}
    for name in ("first", "second"):
        padded[name] = drawn[name].clone()
        padded[name][:, -7:] = -torch.inf
    ids = torch.arange(SIZE - 7).expand(ROWS, -1)
    mine, whole = parts(padded), parts(drawn)
    found = []
    for name in ("entropy", "kl"):
        pair = computed(name, mine, 0.7), computed(name, whole, 0.7, ids)
        for value, held in zip(pair, (mine, whole), strict=True):
            held["first"].grad = None
            value.sum().backward()
        found.append(distance(*pair) < 1e-12)
        found.append(distance(mine["first"].grad, whole["first"].grad) < 1e-12)
    drawn["first"][3, 5] = torch.nan
    broken = vocabulary.entropy(own(drawn["first"]))
    found.append(broken.isnan().tolist() == [row == 3 for row in range(ROWS)])
    return found


def collectives(rows: int) -> dict[str, list[str]]:
    """Return the collectives that each function uses, forward and backward."""
    from parallel.model import vocabulary

    set_chunks(rows)
    used = {}
    for name in NAMES:
        mine = parts(draw())
        with calls() as seen:
            computed(name, mine).sum().backward()
        used[name] = seen
    with calls() as used["top_k"]:
        vocabulary.top_k(mine["first"], 3)
    return used


@contextmanager
def calls() -> Iterator[list[str]]:
    seen: list[str] = []

    def record(name: str) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            seen.append(name)
            return original(*arguments, **keywords)

        return mock.patch.object(dist, name, call)

    with record("all_reduce"), record("all_gather"):
        yield seen


class Largest(TorchDispatchMode):
    """A record of the largest full-precision result of any operation, in elements."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_temporaries(rows: int) -> dict[str, int]:
    """Return the largest fp32 temporaries for bf16 logits and chunks of `rows` rows."""
    from parallel.model import vocabulary

    mine = parts(draw(dtype=torch.bfloat16, size=40 * SIZE))
    set_chunks(rows, mine["first"].shape[1])
    used = {}
    for name in NAMES:
        with Largest() as seen:
            computed(name, mine, 0.7, mine["kept"]).sum().backward()
        used[name] = seen.elements
    with Largest() as seen:
        vocabulary.top_k(mine["first"], 3)
    return {**used, "top_k": seen.elements}
