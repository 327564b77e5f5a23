"""Gates of replayed routing and the z-loss equal vectors computed by hand."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from parallel.batch import RankPlace, lay_out
from parallel.model.policy import Policy
from parallel.model.routing import RoutingLosses
from parallel.settings import LayoutSettings, RoutingLossSettings
from tests.fake_engines import MODEL

pytestmark = pytest.mark.usefixtures("one_rank")


def test_vector_9() -> None:
    """Gates are those of the replayed experts; their gradient reaches the training logits."""
    model = MODEL.model_copy(update={"experts": 3, "experts_per_token": 2})
    [router, *_] = Policy(model, LayoutSettings()).routers
    router.row = lay_out([1], RankPlace())
    logits = torch.tensor([[[1.0, 0.5, 0.4]]], requires_grad=True)
    _, free = router.routing(logits)
    assert free.tolist() == [[True, True, False]]
    router.row.routes = torch.tensor([[[0, 2]]] * model.layers)
    gates, chosen = router.routing(logits)
    assert chosen.tolist() == [[True, False, True]]
    assert gates[0].tolist() == pytest.approx([0.6456563, 0, 0.3543437], abs=1e-7)
    gates[0, 0].backward()
    slope = 0.6456563 * 0.3543437  # of a softmax of two
    assert logits.grad is not None
    assert logits.grad[0, 0].tolist() == pytest.approx([slope, 0, -slope], abs=1e-7)


def test_routes_of_earlier_passes_are_forgotten() -> None:
    """megatron-core appends each pass's to a list, which would hold all routes of a stage."""
    [router, *_] = Policy(MODEL, LayoutSettings()).routers
    router.row = lay_out([1], RankPlace())
    router.row.routes = torch.zeros(MODEL.layers, 1, MODEL.experts_per_token, dtype=torch.int64)
    for _ in range(3):
        router.routing(torch.zeros(1, 1, MODEL.experts))
    assert len(router.router_replay.replay_backward_list) == 1


def test_gates_have_the_same_bits_with_and_without_gradients() -> None:
    """A ratio of a step's first update is exactly 1, also where no routes are replayed."""
    model = MODEL.model_copy(update={"experts": 64, "experts_per_token": 8})
    [router, *_] = Policy(model, LayoutSettings()).routers
    router.row = lay_out([512], RankPlace())
    logits = torch.randn(512, 1, 64, generator=torch.Generator().manual_seed(0))
    gates, choice = router.routing(logits)
    with torch.no_grad():
        gates_without, choice_without = router.routing(logits)
    assert torch.equal(choice, choice_without)
    assert torch.equal(gates, gates_without)


def test_agreement_is_the_share_of_slots_with_the_routers_own_choice() -> None:
    """Only real tokens of watched passes count; the order of experts does not matter."""
    model = MODEL.model_copy(update={"experts": 3, "experts_per_token": 2})
    policy = Policy(model, LayoutSettings())
    row = lay_out([3], RankPlace(), slot=4)
    logits = torch.tensor([[1.0, 0.5, 0.4]]).repeat(4, 1, 1)  # experts 0 and 1
    alike, halves = [[1, 0], [0, 1], [1, 0], [2, 2]], [[0, 2], [2, 1], [1, 0], [0, 1]]

    def passes(routes: list[list[int]] | None) -> None:
        row.routes = None if routes is None else torch.tensor([routes] * model.layers)
        for router in policy.routers:
            router.row = row
            router.routing(logits)

    passes(halves)
    policy.agreement.start()
    passes(alike)
    assert set(policy.agreement.shares().values()) == {1.0}
    policy.agreement.start()
    passes(halves)
    passes(None)
    shares = policy.agreement.shares()
    names = {f"router_agreement_{layer}" for layer in range(model.layers)}
    assert shares == dict.fromkeys(names | {"router_agreement"}, pytest.approx(4 / 6))
    policy.agreement.start()
    passes(None)
    assert policy.agreement.shares() == {}


def test_vector_11() -> None:
    """The loss is of real tokens; padding does not count."""
    losses = RoutingLosses(RoutingLossSettings(z_loss=0.5), [mock.Mock()])
    losses.start(tokens=1.0, micro_batches=1)
    logits = torch.tensor([[2.0, 0, 0, 0], [99.0, 0, 0, 0]], requires_grad=True)
    gates, real = torch.ones(2, 4), torch.tensor([True, False])
    attached = losses.attach(mock.Mock(), gates, gates > 0, logits, real)
    assert torch.equal(attached, gates)
    assert losses.sums["z_loss"] == pytest.approx(5.479124, abs=2e-6)


@pytest.mark.parametrize(
    ("micro_batches", "load_balance", "first"), [(1, 0.1, False), (2, 0.1, True), (2, 0.0, False)]
)
def test_the_load_of_several_micro_batches_is_counted_first(
    micro_batches: int, load_balance: float, first: bool
) -> None:
    losses = RoutingLosses(RoutingLossSettings(load_balance=load_balance), [])
    losses.start(tokens=1.0, micro_batches=micro_batches)
    assert losses.counts_first is first
