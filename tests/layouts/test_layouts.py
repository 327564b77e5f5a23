"""The same batch gives the same loss and gradient, however it is laid out."""

from __future__ import annotations

import numpy as np
import pytest
from cases import LOSSES, SPREAD, gradients, replayed_routing
from conftest import On

from parallel.settings import LayoutSettings

WHOLE, PIECES = 4096, 64  # token budgets: one micro-batch, or several


@pytest.mark.parametrize("replay", [False, True], ids=["routed", "replayed"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_do_not_know_the_layout(loss: str, replay: bool, on: On) -> None:
    [whole] = on(LayoutSettings(), gradients, loss, WHOLE, replay)
    [pieces] = on(LayoutSettings(), gradients, loss, PIECES, replay)
    spread = on(SPREAD, gradients, loss, PIECES, replay)
    copies = on(LayoutSettings(ranks=2), gradients, loss, PIECES, replay)
    assert whole["micro_batches"] == 1
    assert pieces["micro_batches"] > spread[0]["micro_batches"] > 1
    for other in (pieces, *spread, *copies):
        assert other["loss"] == pytest.approx(whole["loss"], rel=1e-6, abs=1e-6)
        for name, found in other["gradients"].items():
            expected = whole["gradients"][name]
            scale = max(float(np.linalg.norm(expected)), 1e-6)
            assert np.linalg.norm(found - expected) / scale < 1e-5, name


def test_every_expert_is_somewhere(on: On) -> None:
    [whole] = on(LayoutSettings(), gradients, "cross_entropy", WHOLE, False)
    spread = on(SPREAD, gradients, "cross_entropy", WHOLE, False)
    held = [{name for name in part["gradients"] if "experts" in name} for part in spread]
    assert not held[0] & held[1]
    assert held[0] | held[1] == {name for name in whole["gradients"] if "experts" in name}


def test_replay_changes_the_experts_and_keeps_the_routers_gradient(on: On) -> None:
    for found in on(SPREAD, replayed_routing):
        assert found["changed"] > 1e-3
        assert found["restored"] == 0.0
        assert found["router_gradient"] > 0.0
