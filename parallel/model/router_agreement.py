"""How far the experts that are replayed are those that the routers would choose themselves (section
5 of the algorithms)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from parallel.cpu.device import device

if TYPE_CHECKING:
    from parallel.model.routing import Router

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class WatchedReplay(RouterReplay):
    """Megatron's replay; while it is watched, it keeps what would have been chosen without it.

    Megatron hands its whole choice to `get_replay_topk` as a function, the experts' biases and the
    limits of groups included, so that no other rule of it is written down here.
    """

    def __init__(self) -> None:
        super().__init__()
        RouterReplay.clear_global_router_replay_instances()  # as `Router` says
        self.watched = False
        self.own: torch.Tensor | None = None  # int64 [tokens, K], of the last pass

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and indices, [tokens, K] each, that the pass uses."""
        replays = self.router_replay_action == RouterReplayAction.REPLAY_FORWARD
        if self.watched and replays and default_compute_topk is not None:
            _, self.own = default_compute_topk(
                scores.detach(), topk, num_groups=num_groups, group_topk=group_topk
            )
        return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)


class RouterAgreement:
    """Counts, in the forward passes between `start` and `shares`, the slots of the top-k that are
    the same. Passes that replay nothing count for nothing."""

    def __init__(self, routers: list[Router], layers: int) -> None:
        """`layers` is the number of all layers that route, wherever they are."""
        self._replays = [router.router_replay for router in routers]
        # Of every layer the slots that agree, and all.
        self._counts = torch.zeros(layers, 2, dtype=torch.float64, device=device())
        for router in routers:
            router.agreement = self

    def start(self) -> None:
        """Count from 0."""
        self._counts.zero_()
        self._watch(True)

    def see(self, router: Router, replayed: torch.Tensor, real: torch.Tensor) -> None:
        """Of one layer's pass over a row: the experts used, int64 [tokens, K], and which tokens of
        this rank are no padding."""
        replay = router.router_replay
        if not replay.watched or replay.own is None:
            return
        chosen = replayed.new_zeros(len(replayed), router.num_experts).scatter_(1, replay.own, 1)
        agree = chosen.gather(1, replayed)[real]
        self._counts[router.place, 0] += agree.sum()
        self._counts[router.place, 1] += agree.numel()

    def shares(self) -> dict[str, float]:
        """`router_agreement`, the mean over all layers, and `router_agreement_N` of every routed
        layer, counted from 0; nothing where nothing was replayed. A collective over all ranks."""
        self._watch(False)
        counts = self._counts
        dist.all_reduce(counts)
        if not counts[:, 1].any():
            return {}
        layers = (counts[:, 0] / counts[:, 1]).tolist()
        each = {f"router_agreement_{layer}": share for layer, share in enumerate(layers)}
        return {"router_agreement": sum(layers) / len(layers), **each}

    def _watch(self, watched: bool) -> None:
        for replay in self._replays:
            replay.watched, replay.own = watched, None
