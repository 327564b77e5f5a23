"""The solver of recalibrated routers: against dense matrices, and its solutions' properties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.kinds.merge_weights.methods import recalibration
from stages.kinds.merge_weights.methods.recalibration import RouterObjective, RouterSamples

EXPERTS, HIDDEN, TOKENS = 5, 12, (40, 25, 3)
SCORES = pytest.mark.parametrize("sigmoid", [False, True], ids=["softmax", "sigmoid"])


def samples(sigmoid: bool = False, scale: float = 1.0) -> list[RouterSamples]:
    """Return three models with inputs in two parts each, whose columns differ widely in size."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    start, columns = normal(EXPERTS, HIDDEN), normal(HIDDEN).exp()
    found = []
    for number, tokens in enumerate(TOKENS):
        inputs = (normal(tokens, HIDDEN) * columns).float()
        router = (start + 0.3 * normal(EXPERTS, HIDDEN)) * scale
        parts = inputs[: tokens // 3], inputs[tokens // 3 :]
        found.append(RouterSamples(router, parts, sigmoid, weight=1 + number))
    return found


def scores(logits: Tensor, sigmoid: bool) -> Tensor:
    if not sigmoid:
        return logits.softmax(-1)
    return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)


def divergence(of: RouterSamples, router: Tensor) -> Tensor:
    """Return the mean KL of the routing by `router` from that by the model's own, in nats."""
    inputs = torch.cat([*of.inputs]).double()
    ours, other = (scores(inputs @ each.T, of.sigmoid) for each in (of.router, router))
    return (ours * (ours.log() - other.log())).sum(-1).mean()


def dense(of: RouterSamples) -> Tensor:
    """Return the matrix of a model's term, [E H, E H], by automatic differentiation of the KL."""
    hessian = torch.autograd.functional.hessian(lambda w: divergence(of, w), of.router)
    whole = hessian.reshape(EXPERTS * HIDDEN, EXPERTS * HIDDEN) * of.weight
    shrunk = whole * recalibration.OFF_DIAGONAL
    return shrunk + torch.diag((1 - recalibration.OFF_DIAGONAL) * whole.diagonal())


def dense_value(terms: list[RouterSamples], router: Tensor) -> Tensor:
    vectors = [(dense(each), (router - each.router).flatten()) for each in terms]
    return sum((vector @ matrix @ vector for matrix, vector in vectors), torch.zeros(()))


@SCORES
def test_the_solution_is_that_of_the_normal_equations(sigmoid: bool) -> None:
    terms = samples(sigmoid)
    start = sum(each.router for each in terms) / len(terms)
    found = RouterObjective(terms).solve(start)
    matrices = [dense(each) for each in terms]
    right = sum(
        matrix @ each.router.flatten() for matrix, each in zip(matrices, terms, strict=True)
    )
    expected = torch.linalg.solve(sum(matrices), right)
    assert (found.router.flatten() - expected).norm() < 1e-9 * expected.norm()
    assert 0 < found.iterations < recalibration.MOST_ITERATIONS


@SCORES
def test_the_value_is_that_of_the_dense_matrices_and_least_at_the_solution(sigmoid: bool) -> None:
    terms = samples(sigmoid)
    objective = RouterObjective(terms)
    merged = sum(each.router for each in terms) / len(terms)
    kept = samples(sigmoid)[0].router - 0.1
    found = objective.solve(merged).router.requires_grad_()
    for router in (merged, kept, found.detach()):
        expected = float(dense_value(terms, router))
        assert objective.value(router) == pytest.approx(expected, rel=1e-9)
    value = dense_value(terms, found)
    [gradient] = torch.autograd.grad(value, found)
    at_start = objective.descent(merged)
    assert gradient.norm() < 1e-9 * at_start.norm()
    assert value < 0.9 * min(objective.value(merged), objective.value(kept))
    # The routing itself is nearer to the models', not only to second order.
    assert sum(each.weight * divergence(each, found) for each in terms) < sum(
        each.weight * divergence(each, merged) for each in terms
    )


def test_equal_models_give_their_router_bit_for_bit() -> None:
    first, *others = samples()
    terms = [first, *(RouterSamples(first.router, each.inputs) for each in others)]
    same = RouterObjective(terms).solve(first.router)
    assert torch.equal(same.router, first.router) and same.iterations == 0
    far = RouterObjective(terms).solve(first.router + 1.0)
    assert (far.router - first.router).norm() < 1e-9 * first.router.norm()


def test_what_no_sample_decides_stays_as_it_is_merged() -> None:
    terms = samples()
    for each in terms:
        for part in each.inputs:
            part[:, 4] = 0
    start = terms[0].router + terms[1].router
    found = RouterObjective(terms).solve(start).router
    assert torch.equal(found[:, 4], start[:, 4])
    assert found.isfinite().all() and not torch.isclose(found[:, 5], start[:, 5]).any()


def test_it_repeats_bit_for_bit_and_does_not_depend_on_the_parts() -> None:
    terms = samples()
    start = terms[0].router
    twice = [RouterObjective(terms).solve(start).router for _ in range(2)]
    assert torch.equal(*twice)
    whole = [
        RouterSamples(each.router, [torch.cat([*each.inputs])], weight=each.weight)
        for each in terms
    ]
    one = RouterObjective(whole).solve(start).router
    assert (one - twice[0]).norm() < 1e-9 * one.norm()


@SCORES
@pytest.mark.parametrize("scale", [10.0, 100.0, 300.0, 1000.0])
def test_scores_near_0_and_1_leave_no_rounding_alone(scale: float, sigmoid: bool) -> None:
    """At scale 300 every softmax is 1 to the last bit, and the objective near 1e-19."""
    terms = samples(sigmoid, scale)
    start = sum(each.router for each in terms) / len(terms)
    objective = RouterObjective(terms)
    found = objective.solve(start)
    assert found.iterations < 100
    assert 0 < objective.value(found.router) < 0.2 * objective.value(start)
