"""One batch gives one loss and gradient under every layout."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch

from parallel.settings import LayoutSettings, RoutingLossSettings
from tests.layouts.cases import (
    ALL,
    CORE,
    EACH_ONCE,
    MATRIX,
    MODEL,
    SPREAD,
    Batching,
    differences,
    expected_kept_logprobs,
    forward_passes,
    gloo_loops,
    gradient_of_routing_losses,
    held_experts,
    kept_logprobs,
    low_precision,
    reference,
    replayed_routing,
    router_agreement,
)
from tests.ranks import On
from tests.tiers import tiered

LOSSES = RoutingLossSettings(load_balance=0.1, z_loss=0.01)
RECOMPUTED = ("TP2 recomputed", "VPP2 recomputed", "CP2 attention recomputed")
ONE_DEVICE = [pytest.param("1 rank", marks=pytest.mark.one_device)]


@pytest.fixture(scope="session")
def one_process(on: On, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one process's loss and gradients for one micro-batch."""
    directory = tmp_path_factory.mktemp("reference")
    on(LayoutSettings(), reference, str(directory), LOSSES)
    return directory


@pytest.mark.parametrize(
    ("name", "batchings"),
    [pytest.param("1 rank", ALL, marks=pytest.mark.one_device)]
    + [(name, EACH_ONCE) for name in (*CORE[1:], *RECOMPUTED)]
    + [pytest.param(name, ALL, marks=pytest.mark.combinations) for name in list(MATRIX)[1:]],
)
def test_loss_and_gradients_are_equal_under_every_layout(
    name: str, batchings: list[Batching], on: On, one_process: Path
) -> None:
    """Covers SFT, GSPO with KL, distillation; packing; micro-batches; replay; routing losses."""
    layout = MATRIX[name]
    counts = set()
    for rank in on(layout, differences, layout, str(one_process), LOSSES, batchings):
        for found in rank:
            counts.add(found["micro_batches"])
            assert found["loss"] < 1e-6, found
            assert found["gradient"][0] < 1e-5, found
    assert min(counts) <= layout.pipeline
    assert max(counts) >= 4


def test_gradients_of_an_uneven_virtual_pipeline_are_equal(on: On, tmp_path: Path) -> None:
    """Chunks of 2, 1, 2 and 1 layers, which 4 layers do not allow."""
    layout = LayoutSettings(ranks=2, pipeline=2, virtual_pipeline=2, first_stage_layers=4)
    model = MODEL.model_copy(update={"layers": 6})
    batchings: list[Batching] = [("cross_entropy", 4, False, False)]
    on(LayoutSettings(), reference, str(tmp_path), LOSSES, model)
    for rank in on(layout, differences, layout, str(tmp_path), LOSSES, batchings, model):
        for found in rank:
            assert found["loss"] < 1e-6, found
            assert found["gradient"][0] < 1e-5, found


@pytest.mark.parametrize("name", [*ONE_DEVICE, "TP2", "CP2", "PP2"])
def test_log_probabilities_are_over_the_kept_ids(name: str, on: On) -> None:
    [expected] = on(LayoutSettings(), expected_kept_logprobs)
    found: dict[float, float] = {}
    for rank in on(MATRIX[name], kept_logprobs, MATRIX[name]):
        found.update(rank)
    assert found == pytest.approx(expected, abs=1e-4)


def test_all_process_groups_but_separate_ones_share_one_gloo_device(on: On) -> None:
    """Otherwise each of some twenty groups has a thread that wakes 100 times a second."""
    assert on(SPREAD, gloo_loops) == [[1, 2, 1], [1, 2, 1]]


def test_every_expert_is_on_some_rank(on: On) -> None:
    [whole] = on(LayoutSettings(), held_experts, LayoutSettings())
    held = on(SPREAD, held_experts, SPREAD)
    assert not held[0] & held[1]
    assert held[0] | held[1] == whole


def test_replay_changes_the_experts_and_keeps_the_routers_gradient(on: On) -> None:
    for found in on(SPREAD, replayed_routing, SPREAD):
        assert found["changed"] > 1e-3
        assert found["restored"] == 0.0
        assert found["router_gradient"] > 0.0


@pytest.mark.parametrize("name", [*ONE_DEVICE, *tiered(list(MATRIX)[1:], CORE)])
def test_router_agreement_is_equal_under_every_layout(name: str, on: On) -> None:
    [expected] = on(LayoutSettings(), router_agreement, LayoutSettings())
    assert expected["router_agreement"] == pytest.approx(
        MODEL.experts_per_token / MODEL.experts, abs=0.05
    )
    assert len(expected) == 1 + MODEL.layers
    for found in on(MATRIX[name], router_agreement, MATRIX[name]):
        # One slot of hundreds may be decided by rounding.
        assert found == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("count", "balance", "passes"), [(1, 0.1, 1), (4, 0.1, 2), (4, 0.0, 1)])
def test_a_step_counts_the_load_in_separate_passes_only_if_it_must(
    count: int, balance: float, passes: int, on: On
) -> None:
    losses = RoutingLossSettings(load_balance=balance, z_loss=0.01)
    assert on(SPREAD, forward_passes, SPREAD, losses, count) == [{passes}, {passes}]


@pytest.mark.parametrize(("recompute", "passes"), [("full", 2), ("attention", 1)])
def test_full_recomputation_passes_every_layer_twice(
    recompute: Literal["full", "attention"], passes: int, on: On
) -> None:
    layout = SPREAD.model_copy(update={"recompute": recompute})
    losses = RoutingLossSettings(z_loss=0.01)
    assert on(layout, forward_passes, layout, losses, 1) == [{passes}, {passes}]


@pytest.mark.one_device
def test_routing_losses_have_the_gradient_of_their_definition(on: On) -> None:
    """Compared with the specification's formulas in float64 for one router."""
    layout = LayoutSettings()
    [errors] = on(layout, gradient_of_routing_losses, layout, LOSSES)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    ("name", "distributed"),
    [pytest.param("1 rank", each, marks=pytest.mark.one_device) for each in (True, False)]
    + tiered(product(("TP2", "VPP2"), (True, False)), {("TP2", False), ("VPP2", True)}),
)
def test_low_precision_keeps_what_must_be_exact(name: str, distributed: bool, on: On) -> None:
    layout = MATRIX[name].model_copy(update={"distributed_optimizer": distributed})
    low, full = 0.0, 0.0
    for found in on(layout, low_precision, layout):
        assert found["weights"] == {torch.bfloat16}
        for kept in ("gradients", "masters", "moments", "routing"):
            assert found[kept] == {torch.float32}, kept
        low += sum(found["losses"]["low"])
        full += sum(found["losses"]["full"])
    assert low == pytest.approx(full, rel=0.01)
    assert low != full
