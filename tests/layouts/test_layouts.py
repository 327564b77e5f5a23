"""The same batch gives the same loss and gradient, however it is laid out."""

from __future__ import annotations

import numpy as np
import pytest
from cases import LOSSES, gradients, replayed_routing
from ranks import Ranks

WHOLE, PIECES = 4096, 64  # token budgets: one micro-batch, or several


@pytest.mark.parametrize("replay", [False, True], ids=["routed", "replayed"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_do_not_know_the_layout(
    loss: str, replay: bool, one_rank: Ranks, two_ranks: Ranks, two_replicas: Ranks
) -> None:
    [whole] = one_rank(gradients, loss, WHOLE, replay)
    [pieces] = one_rank(gradients, loss, PIECES, replay)
    spread = two_ranks(gradients, loss, PIECES, replay)
    copies = two_replicas(gradients, loss, PIECES, replay)
    assert whole["micro_batches"] == 1
    assert pieces["micro_batches"] > spread[0]["micro_batches"] > 1
    for other in (pieces, *spread, *copies):
        assert other["loss"] == pytest.approx(whole["loss"], rel=1e-6, abs=1e-6)
        for name, found in other["gradients"].items():
            expected = whole["gradients"][name]
            scale = max(float(np.linalg.norm(expected)), 1e-6)
            assert np.linalg.norm(found - expected) / scale < 1e-5, name


def test_every_expert_is_somewhere(one_rank: Ranks, two_ranks: Ranks) -> None:
    [whole] = one_rank(gradients, "cross_entropy", WHOLE, False)
    spread = two_ranks(gradients, "cross_entropy", WHOLE, False)
    held = [{name for name in part["gradients"] if "experts" in name} for part in spread]
    assert not held[0] & held[1]
    assert held[0] | held[1] == {name for name in whole["gradients"] if "experts" in name}


def test_replay_changes_the_experts_and_keeps_the_routers_gradient(two_ranks: Ranks) -> None:
    for found in two_ranks(replayed_routing):
        assert found["changed"] > 1e-3
        assert found["restored"] == 0.0
        assert found["router_gradient"] > 0.0
