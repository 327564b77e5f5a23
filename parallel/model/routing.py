"""The routers: replay of the engine's experts, stability losses, agreement and movement.

Replay (R3, arXiv 2510.11370): a forward pass takes the experts that the engine chose. The gates are
the softmax of the training logits over the replayed experts, so the router keeps its gradient.

Routing-stability losses, over the real tokens of a whole optimizer step:

- load balance: coefficient * E * sum_e f_e P_e, with f_e the share of all routing slots that went
  to expert e and P_e the mean of its normalised scores. A uniform load gives `coefficient`.
- z-loss: coefficient * mean(logsumexp(logits)^2) (arXiv 2202.08906).

Both are summed over layers. Megatron's own losses have the micro-batch, the data-parallel rank and
the padding in their denominators, so their gradients depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from parallel.batch import MicroBatch, PackedRow
from parallel.machine.device import device
from parallel.settings import RoutingLossSettings

SMALLEST = 1e-30  # probability, before its logarithm


class WatchedReplay(RouterReplay):
    """Megatron's replay; while watched, it records the experts that the router would have chosen.

    Megatron passes its whole selection to `get_replay_topk` as a function, including the experts'
    biases and the group limits, so no selection rule is repeated here.
    """

    watched = False
    own_choice: Tensor | None = None  # int64 [tokens, K], of the last pass

    def get_replay_topk(self, scores: Tensor, topk: int, *options: Any) -> tuple[Tensor, Tensor]:
        """Return the values and indices, [tokens, K] each, that the pass uses."""
        *groups, select = options
        if self.watched and self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            _, self.own_choice = select(scores.detach(), topk, *groups)
        # megatron-core 0.19.2 sorts the experts where gradients are enabled, and only there
        # (moe_utils.py, `sorted=torch.is_grad_enabled()`). The order is that of the sum which
        # normalises the gates: a pass without gradients would round them in another way.
        with torch.enable_grad():
            return super().get_replay_topk(scores, topk, *options)


class Router(TopKRouter):
    """Megatron's router, given the packed row of every forward pass."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config=config, **options)
        self.router_replay = WatchedReplay()
        # Megatron's process-wide list would mix a policy's, its reference's and teachers' routers.
        RouterReplay.clear_global_router_replay_instances()
        self.place = 0  # among all routed layers of the model
        self.row: PackedRow | None = None
        self.losses: RoutingLosses | None = None
        self.memory: RouterMemory | None = None
        self.agreement: RouterAgreement | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return gates and choice, both [tokens, experts], of this rank's share of the row."""
        row, replay = self.row, self.router_replay
        assert row is not None and replay is not None
        replay.clear_indices()
        routes = None if row.routes is None else self._local(row.routes[self.place])
        if routes is None:
            replay.clear_router_replay_action()
        else:
            replay.set_target_indices(routes)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        gates, choice = super().routing(logits, padding_mask)
        if self.agreement is not None and routes is not None:
            self.agreement.see(self, routes, self._local(row.real))
        if self.memory is not None:
            self.memory.see(self, _scores(self, logits.flatten(0, -2).float()), choice)
        if self.losses is not None and self.training:
            gates = self.losses.attach(self, gates, choice, logits, self._local(row.real))
        return gates, choice

    def _local(self, values: Tensor) -> Tensor:
        """Return this rank's sequence-parallel share of a context-parallel rank's tokens."""
        if not self.config.sequence_parallel:
            return values
        return values.chunk(self.tp_group.size())[self.tp_group.rank()]


def connect(chunks: Iterable[GPTModel], routed_layers: range) -> list[Router]:
    """Make every routed layer pass its row to its router; return this rank's routers.

    `routed_layers` are the layers with experts, counted from 0; recorded routes cover only these. A
    recomputed forward pass sets its micro-batch's row again, since Megatron's activation
    checkpointing calls the layer with the same arguments.
    """
    routers = []
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            if number in routed_layers:
                layer.mlp.router.place = routed_layers.index(number)
                layer.register_forward_pre_hook(_set_row, with_kwargs=True)
                routers.append(layer.mlp.router)
    return routers


@contextmanager
def router_inputs(router: Router) -> Iterator[list[Tensor]]:
    """Keep the inputs of a router in the forward passes inside the context.

    Yields a list that gets [tokens, H] of every pass: this rank's share of the row, without
    padding.
    """
    inputs: list[Tensor] = []

    def keep(_: Router, arguments: tuple[Any, ...]) -> None:
        assert router.row is not None
        hidden = arguments[0].detach().flatten(0, -2)
        inputs.append(hidden[router._local(router.row.real)])

    hook = router.register_forward_pre_hook(keep)
    try:
        yield inputs
    finally:
        hook.remove()


def _set_row(layer: Any, _arguments: tuple, keywords: dict[str, Any]) -> None:
    layer.mlp.router.row = keywords["packed_seq_params"]


class RoutingLosses:
    """The stability losses of one policy, normalised by the global counts of a step.

    The f_e of the load balance cover the whole step. A step of one micro-batch counts in its own
    forward pass, where every layer sums its counts over the ranks before attaching its loss. A step
    of several micro-batches counts first, in forward passes without gradients inside `counting`.
    Both give the same bits.

    Example: 4 tokens, 2 experts, top 1. Each expert gets 2 tokens and scores of mean 1/2: the load
    balance is 2 x (1/2 x 1/2 + 1/2 x 1/2) = 1. If expert 0 gets all, with a mean score of .9, it is
    2 x (1 x .9 + 0 x .1) = 1.8. Logits (0, ln 3) of a token have logsumexp ln 4, and z-loss 1.92.
    """

    def __init__(self, settings: RoutingLossSettings, routers: list[Router]) -> None:
        self.settings = settings
        self.routers = routers
        self.tokens = 0.0
        self.sums: dict[str, float] = {}
        self._counting = False
        self._one_batch = False
        self._load: dict[Router, Tensor] = {}
        for router in routers:
            router.losses = self

    @property
    def counts_first(self) -> bool:
        """True if the step needs forward passes that only count."""
        return self.settings.load_balance > 0 and not self._one_batch

    def start(self, tokens: float, micro_batches: int) -> None:
        """Start a step of `micro_batches` forward passes per rank and `tokens` real tokens."""
        self.tokens = tokens
        self.sums = dict.fromkeys(("load_balance", "z_loss"), 0.0)
        self._one_batch = micro_batches == 1
        self._load = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Only count in the forward passes inside; then sum over the ranks of the same layers.

        Waits for: at the end, all ranks that have these layers.
        Unblocked by: the end of the context on each of them.
        """
        for router in self.routers:
            self._load[router] = torch.zeros(router.num_experts, device=router.weight.device)
        self._counting = True
        yield
        self._counting = False
        if self.routers:
            every = torch.stack([self._load[router] for router in self.routers])
            dist.all_reduce(every, group=self.routers[0].tp_dp_cp_group)
            self._load = dict(zip(self.routers, every, strict=True))

    def attach(
        self, router: Router, gates: Tensor, choice: Tensor, logits: Tensor, real: Tensor
    ) -> Tensor:
        """Return `gates` with this layer's losses attached, so that a backward pass adds them."""
        if self._counting:
            self._load[router] += choice[real].sum(0)
        elif self._one_batch and self.settings.load_balance > 0 and router not in self._load:
            # Counts are whole numbers, exact in fp32: any order of the sum gives the same bits.
            self._load[router] = load = choice[real].sum(0).float()
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
        """Return the means over the routed `layers` of the attached losses. Collective.

        load_balance is 1 where all experts are used equally. Losses with coefficient 0 are omitted.
        """
        names = [name for name in self.sums if getattr(self.settings, name) > 0]
        sums = torch.tensor([self.sums[name] for name in names], dtype=torch.float64)
        if names:
            sums = sums.to(self.routers[0].weight.device)
            dist.all_reduce(sums)
        return {name: total / layers for name, total in zip(names, sums.tolist(), strict=True)}


class RouterAgreement:
    """A count of the top-k slots in which the replayed experts are the router's own choice.

    Includes the forward passes between `start` and `shares` that replay routes. `layers` counts the
    routed layers of all ranks.

    Example: top 2 of 4 experts. The engine took 0 and 3, the router would take 3 and 1: 1 of 2
    slots agrees. Over 100 tokens of which 99 agree in both, a layer's share is 199 / 200 = .995.
    """

    def __init__(self, routers: list[Router], layers: int) -> None:
        self._replays = [router.router_replay for router in routers]
        # Per layer: the slots that agree, and all slots.
        self._counts = torch.zeros(layers, 2, dtype=torch.float64, device=device())
        for router in routers:
            router.agreement = self

    def start(self) -> None:
        """Count from 0."""
        self._counts.zero_()
        self._watch(True)

    def see(self, router: Router, replayed: Tensor, real: Tensor) -> None:
        """Count one layer's pass: the experts used, int64 [tokens, K], and the real tokens."""
        replay = router.router_replay
        if not replay.watched or replay.own_choice is None:
            return
        choice = replayed.new_zeros(len(replayed), router.num_experts).scatter_(
            1, replay.own_choice, 1
        )
        agree = choice.gather(1, replayed)[real]
        self._counts[router.place, 0] += agree.sum()
        self._counts[router.place, 1] += agree.numel()

    def shares(self) -> dict[str, float]:
        """Return `router_agreement`, the mean over layers, and `router_agreement_N` of each layer.

        Routed layers count from 0; empty where no routes were replayed. Collective over all ranks.
        """
        self._watch(False)
        counts = self._counts
        dist.all_reduce(counts)
        if not counts[:, 1].any():
            return {}
        layers = (counts[:, 0] / counts[:, 1]).tolist()
        by_layer = {f"router_agreement_{layer}": share for layer, share in enumerate(layers)}
        return {"router_agreement": sum(layers) / len(layers), **by_layer}

    def _watch(self, watched: bool) -> None:
        for replay in self._replays:
            replay.watched, replay.own_choice = watched, None


class RouterMemory:
    """The movement of a policy's routers on the same tokens (RSPO, arXiv 2510.23027 v2).

    A "remember" pass stores with its row, for every layer of this rank, the chosen experts and
    their log-probabilities, [tokens, K] each; a "compare" pass sums the differences from the
    current ones. Passes have no gradients. `layers` counts the routed layers of all ranks.
    """

    def __init__(self, routers: list[Router], layers: int) -> None:
        self._layers = layers
        self._task: Literal["remember", "compare"] | None = None
        for router in routers:
            router.memory = self

    @contextmanager
    def during(self, task: Literal["remember", "compare"]) -> Iterator[None]:
        """Remember or compare in the forward passes inside the context."""
        self._task = task
        try:
            yield
        finally:
            self._task = None

    def see(self, router: Router, scores: Tensor, choice: Tensor) -> None:
        """Record one layer's pass: normalised scores and bool choice, both [tokens, experts]."""
        row = router.row
        if self._task is None or row is None:
            return
        logprobs = scores.clamp(min=SMALLEST).log()
        if self._task == "remember":
            experts = choice.int().topk(router.topk).indices
            row.remembered[router.place] = (experts, logprobs.gather(1, experts))
        else:
            experts, before = row.remembered[router.place]
            moved = (logprobs.gather(1, experts) - before).abs().mean(1)
            row.moved = moved if row.moved is None else row.moved + moved

    def movement(self, batch: MicroBatch) -> Tensor:
        """Return the mean over layers and chosen experts of |log p - log p before|, in nats.

        [T / C], for every token of this context-parallel rank, from the last "compare" pass.
        Collective.
        """
        row = batch.row
        tensor = parallel_state.get_tensor_model_parallel_group()
        moved, row.moved = row.moved, None
        if moved is None:  # a pipeline rank without routers
            moved = torch.zeros(len(row.real) // tensor.size(), device=row.real.device)
        if tensor.size() > 1:  # sequence parallelism gave each of its ranks a part of the tokens
            whole = moved.new_empty(len(row.real))
            dist.all_gather_into_tensor(whole, moved.contiguous(), group=tensor)
            moved = whole
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(moved, group=parallel_state.get_pipeline_model_parallel_group())
        return moved / self._layers


def _scores(router: Router, logits: Tensor) -> Tensor:
    """Return scores [tokens, experts] that sum to 1 per token."""
    if router.score_function == "sigmoid":
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)
    return logits.softmax(-1)
