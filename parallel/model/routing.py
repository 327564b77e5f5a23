"""The router of every layer: which experts are used, and what keeps them stable.

Replay (R3, arXiv 2510.11370): a forward pass takes the experts that the engine chose. The gates are
still the softmax of the training logits over the replayed experts, so the router keeps its gradient
(section 5 of the algorithms).

Routing-stability losses (section 6), over the real tokens of a whole optimizer step:

- load balance: coefficient * E * sum_e f_e P_e, with f_e the share of all routing slots that went
  to expert e and P_e the mean of its normalised scores. It is `coefficient` when all is even.
- z-loss: coefficient * mean(logsumexp(logits)^2) (arXiv 2202.08906).

Both are summed over layers. Megatron's own have the micro-batch, the data-parallel rank and the
padding in their denominators, so that their gradient changes with the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from parallel.model.router_agreement import RouterAgreement, WatchedReplay
from parallel.model.router_memory import RouterMemory
from parallel.packing import PackedRow
from parallel.settings import RoutingLossSettings


class Router(TopKRouter):
    """Megatron's router, told of every forward pass which row of tokens it reads."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        # Megatron's process-wide list would mix those of a policy, its reference and teachers.
        RouterReplay.clear_global_router_replay_instances()
        self.router_replay = WatchedReplay()
        self.place = 0  # among all routed layers of the model
        self.row: PackedRow | None = None
        self.losses: RoutingLosses | None = None
        self.memory: RouterMemory | None = None
        self.agreement: RouterAgreement | None = None

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and choice, both [tokens, experts], from this rank's share of the row's logits."""
        row, replay = self.row, self.router_replay
        assert row is not None and replay is not None
        replay.clear_indices()
        routes = None if row.routes is None else self._own(row.routes[self.place])
        if routes is None:
            replay.clear_router_replay_action()
        else:
            replay.set_target_indices(routes)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        gates, chosen = super().routing(logits, padding_mask)
        if self.agreement is not None and routes is not None:
            self.agreement.see(self, routes, self._own(row.real))
        if self.memory is not None:
            self.memory.see(self, _scores(self, logits.flatten(0, -2).float()), chosen)
        if self.losses is not None and self.training:
            gates = self.losses.attach(self, gates, chosen, logits, self._own(row.real))
        return gates, chosen

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        """Of a context-parallel rank's tokens those that sequence parallelism leaves here."""
        if not self.config.sequence_parallel:
            return values
        return values.chunk(self.tp_group.size())[self.tp_group.rank()]


def connect(chunks: Iterable[GPTModel], routed_layers: range) -> list[Router]:
    """Let every routed layer tell its router which row it is given; returns this rank's routers.

    `routed_layers` are the numbers, counted from 0, of the layers that have experts: recorded
    routes name only those. A layer is told anew when its forward pass is recomputed, with the row
    of that micro-batch, since Megatron's checkpointing hands it the same arguments again.
    """
    routers = []
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            if number in routed_layers:
                layer.mlp.router.place = routed_layers.index(number)
                layer.register_forward_pre_hook(_tell_router, with_kwargs=True)
                routers.append(layer.mlp.router)
    return routers


def _tell_router(layer: Any, _arguments: tuple, keywords: dict[str, Any]) -> None:
    layer.mlp.router.row = keywords["packed_seq_params"]


class RoutingLosses:
    """The stability losses of one policy, normalised by the global counts of a step.

    The f_e of a load balance are of the whole step. A step of one micro-batch counts in its own
    forward pass, where every layer sums its counts over the ranks before it attaches its loss. One
    of several counts first, in forward passes without gradients between `start_counting` and
    `finish_counting`. Both give the same bits.
    """

    def __init__(self, settings: RoutingLossSettings, routers: list[Router]) -> None:
        self.settings = settings
        self.routers = routers
        self.tokens = 0.0
        self.sums: dict[str, float] = {}
        self._counting = False
        self._one_batch = False
        self._load: dict[Router, torch.Tensor] = {}
        for router in routers:
            router.losses = self

    @property
    def counts_first(self) -> bool:
        """Return whether the step needs forward passes that only count."""
        return self.settings.load_balance > 0 and not self._one_batch

    def start(self, tokens: float, micro_batches: int) -> None:
        """Begin a step of `micro_batches` forward passes on every rank, which read `tokens` tokens
        on all ranks together, padding left out."""
        self.tokens = tokens
        self.sums = dict.fromkeys(("load_balance", "z_loss"), 0.0)
        self._one_batch = micro_batches == 1
        self._load = {}

    def start_counting(self) -> None:
        """Count the forward passes that follow."""
        self._counting = True
        for router in self.routers:
            self._load[router] = torch.zeros(router.num_experts, device=router.weight.device)

    def finish_counting(self) -> None:
        """Sum the counts over all ranks that hold the same layers; a collective over them."""
        self._counting = False
        if self.routers:
            every = torch.stack([self._load[router] for router in self.routers])
            dist.all_reduce(every, group=self.routers[0].tp_dp_cp_group)
            self._load = dict(zip(self.routers, every, strict=True))

    def attach(
        self,
        router: Router,
        gates: torch.Tensor,
        chosen: torch.Tensor,
        logits: torch.Tensor,
        real: torch.Tensor,
    ) -> torch.Tensor:
        """`gates` with this layer's losses hung to them, so that a backward pass visits them."""
        if self._counting:
            self._load[router] += chosen[real].sum(0)
        elif self._one_batch and self.settings.load_balance > 0 and router not in self._load:
            self._load[router] = load = chosen[real].sum(0).float()
            dist.all_reduce(load, group=router.tp_dp_cp_group)
        if self._counting or not torch.is_grad_enabled():
            return gates  # also the first of two passes, when activations are computed again
        loss = gates.new_zeros((), dtype=torch.float32)
        logits = logits[real].float()
        if self.settings.load_balance > 0:
            share = self._load[router] / (self.tokens * router.topk)
            balance = router.num_experts * (_scores(router, logits).sum(0) / self.tokens) @ share
            loss = loss + self.settings.load_balance * balance
            self.sums["load_balance"] += balance.item()
        if self.settings.z_loss > 0:
            square = logits.logsumexp(-1).square().sum() / self.tokens
            loss = loss + self.settings.z_loss * square
            self.sums["z_loss"] += square.item()
        return MoEAuxLossAutoScaler.apply(gates, loss) if loss.requires_grad else gates

    def metrics(self, layers: int) -> dict[str, float]:
        """Means over the model's routed `layers` of what was attached; a collective over all ranks.

        load_balance is 1 where all experts are used alike; absent is what was not asked for.
        """
        names = [name for name in self.sums if getattr(self.settings, name) > 0]
        sums = torch.tensor([self.sums[name] for name in names], dtype=torch.float64)
        if names:
            sums = sums.to(self.routers[0].weight.device)
            dist.all_reduce(sums)
        return {name: total / layers for name, total in zip(names, sums.tolist(), strict=True)}


def _scores(router: Router, logits: torch.Tensor) -> torch.Tensor:
    """[tokens, experts], each token's adding up to 1."""
    if router.score_function == "sigmoid":
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)
    return logits.softmax(-1)
