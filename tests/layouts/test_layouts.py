"""The same batch gives the same loss and gradient, however it is laid out."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import (
    SPREAD,
    differences,
    gradient_of_routing_losses,
    held_experts,
    reference,
    replayed_routing,
)
from conftest import On

from parallel.settings import LayoutSettings, RoutingLossSettings

LOSSES = RoutingLossSettings(load_balance=0.1, z_loss=0.01)
MATRIX = {
    "1 rank": {},
    "DP2": {"ranks": 2},
    "TP2": {"ranks": 2, "tensor": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
    "VPP2": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    "EP2": {"ranks": 2, "expert": 2},
    "CP2": {"ranks": 2, "context": 2},
    "ETP2": {"ranks": 2, "expert_tensor": 2},
    "TP2 recomputed": {"ranks": 2, "tensor": 2, "recompute": "full"},
    "VPP2 recomputed": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2, "recompute": "full"},
    "CP2 attention recomputed": {"ranks": 2, "context": 2, "recompute": "attention"},
    "TP2 EP2 PP2": {"ranks": 4, "tensor": 2, "expert": 2, "pipeline": 2},
    "TP2 CP2 EP2 ETP2": {"ranks": 4, "tensor": 2, "context": 2, "expert": 2, "expert_tensor": 2},
    "CP2 EP2 VPP2": {
        "ranks": 4,
        "context": 2,
        "expert": 2,
        "pipeline": 2,
        "virtual_pipeline": 2,
    },
    "DP2 TP2 EP2 PP2": {"ranks": 8, "tensor": 2, "expert": 2, "pipeline": 2},
}


@pytest.fixture(scope="session")
def one_process(on: On, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loss and gradients of one process and one micro-batch."""
    directory = tmp_path_factory.mktemp("reference")
    on(LayoutSettings(), reference, str(directory), LOSSES)
    return directory


@pytest.mark.parametrize("name", MATRIX)
def test_loss_and_gradients_do_not_know_the_layout(name: str, on: On, one_process: Path) -> None:
    """SFT, GSPO with KL, and distillation; packed and padded; cut in one and in four or more;
    routed freely and replayed; with the routers' losses."""
    layout = LayoutSettings(**MATRIX[name])
    counts = set()
    for rank in on(layout, differences, layout, str(one_process), LOSSES):
        for found in rank:
            counts.add(found["micro_batches"])
            assert found["loss"] < 1e-6, found
            assert found["gradient"][0] < 1e-5, found
    assert min(counts) <= layout.pipeline
    assert max(counts) >= 4


def test_every_expert_is_somewhere(on: On) -> None:
    [whole] = on(LayoutSettings(), held_experts, LayoutSettings())
    held = on(SPREAD, held_experts, SPREAD)
    assert not held[0] & held[1]
    assert held[0] | held[1] == whole


def test_replay_changes_the_experts_and_keeps_the_routers_gradient(on: On) -> None:
    for found in on(SPREAD, replayed_routing, SPREAD):
        assert found["changed"] > 1e-3
        assert found["restored"] == 0.0
        assert found["router_gradient"] > 0.0


def test_routing_losses_have_the_gradient_of_their_definition(on: On) -> None:
    """Against the formulas of the specification, written out in float64 for one router."""
    layout = LayoutSettings()
    [errors] = on(layout, gradient_of_routing_losses, layout, LOSSES)
    assert max(errors.values()) < 1e-5, errors
