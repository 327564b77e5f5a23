"""Routing replay (R3, arXiv 2510.11370): a forward pass takes the experts the engine chose.

The gates are still the softmax of the training logits over the replayed experts, so the router
keeps its gradient (section 5 of the algorithms).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction


def adopt_routers(model: Any) -> list[RouterReplay]:
    """This model's routers, in layer order, taken out of Megatron's process-wide list.

    The list would mix the routers of the policy, a reference and the teachers.
    """
    RouterReplay.clear_global_router_replay_instances()
    return [layer.mlp.router.router_replay for layer in model.decoder.layers]


def replay(routers: list[RouterReplay], routes: torch.Tensor | None) -> None:
    """Make the next forward pass use `routes` [layers, tokens, experts_per_token], or its own."""
    for index, router in enumerate(routers):
        router.clear_indices()
        if routes is None:
            router.clear_router_replay_action()
        else:
            router.set_target_indices(routes[index])
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
