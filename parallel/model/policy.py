"""The policy: a model under the stage's layout, with its optimizer if it trains; and the critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import functional

from parallel import families
from parallel.batch import MicroBatch, Responses
from parallel.hugging_face import weights as hugging_face_weights
from parallel.machine.capabilities import check_optimizer, data_parallel_flags, this_machine
from parallel.machine.device import device
from parallel.model import routing
from parallel.model.bridge import build_bridge
from parallel.model.gpt import build_chunks, keep_sums
from parallel.model.host_state import HostState
from parallel.model.offload import ALL, STATE, Residency
from parallel.model.parameters import initialize
from parallel.model.routing import RouterAgreement, RouterMemory
from parallel.model.vocabulary import HeadLogits
from parallel.settings import LayoutSettings, ModelSettings, OptimizerSettings, RoutingLossSettings
from parallel.weights import names

# responses -> (loss divided by its global denominator, a value to return to the caller)
LossFunction = Callable[[Responses], tuple[Tensor, Any]]
Evaluation = Callable[[Responses], Any]


class Policy:
    """A model without an optimizer: a reference, a teacher, or the base of a trained policy.

    Example: the batch of `MicroBatch`, 7 tokens of 2 samples, on 1 rank, in a vocabulary of 80.

        tokens [1, 7] -> hidden [7, 1, H] -> the 5 that predict a trained token [5, 1, H]
        -> logits [5, 80] -> `target_logprobs([batch], 1.0)`: one fp32 [2, 3]
    """

    def __init__(self, settings: ModelSettings, layout: LayoutSettings) -> None:
        self.bridge = build_bridge(settings, layout)
        self.chunks = self._build_chunks()
        self.settings = settings
        self.routed_layers = families.routed_layers(settings)
        self.routers = routing.connect(self.chunks, self.routed_layers)
        self.agreement = RouterAgreement(self.routers, len(self.routed_layers))
        low_precision = self.bridge.config.bf16
        self.modules: list[Any] = [
            Float16Module(self.bridge.config, chunk) if low_precision else chunk
            for chunk in self.chunks
        ]
        for router in self.routers:
            router._maintain_float32_expert_bias()  # before it is loaded, not at the first pass
        self._batch: MicroBatch | None = None
        self._hidden: Tensor | None = None
        self._training = False
        if self.chunks[-1].post_process:
            head = self.chunks[-1].output_layer
            head.sequence_parallel = False  # `_select_responses` gathers before it selects
            if settings.precise_head and not isinstance(head, ValueHead):
                keep_sums(head)
            head.register_forward_pre_hook(self._select_responses)
        self.residency = Residency(self.chunks)

    def start_fresh(self, seed: int) -> None:
        """Load the run's initial weights: a Hugging Face checkpoint's, or random ones."""
        if self.settings.initial_weights is not None:
            self.load_hugging_face(self.settings.initial_weights)
            return
        self.residency.hold()
        for chunk in self.chunks:
            initialize(chunk, self.settings, seed)
        self.weights_changed()

    def load_hugging_face(self, source: Path) -> None:
        """Load this rank's shards of a Hugging Face checkpoint.

        Raises:
            WeightsError: it is of another model.
        """
        self.residency.hold()
        hugging_face_weights.load_weights(self.settings, self.bridge, self.chunks, source)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Update copies of the weights; call after writing weights other than by a step."""
        self.residency.written()

    @torch.no_grad()
    def evaluate(self, batches: list[MicroBatch], function: Evaluation) -> list[Any]:
        """Return the results of `function` on every micro-batch's responses, without gradients.

        Logits are computed chunk by chunk, on demand. The list is empty except on the last pipeline
        stage.

        Waits for: the ranks of this data-parallel replica, and those that share its experts.
        Unblocked by: the same call on all of them, with equally many micro-batches.
        """
        self.residency.hold()
        for chunk in self.chunks:
            chunk.eval()
        self._training = False
        return self._run(
            batches, lambda responses: (torch.zeros((), device=device()), function(responses))
        )

    def target_logprobs(self, batches: list[MicroBatch], temperature: float) -> list[Tensor]:
        """Return log pi of every target in nats, fp32 [B, R] per micro-batch; as `evaluate`."""
        return self.evaluate(batches, lambda responses: responses.logprobs(temperature))

    def response_logits(self, batches: list[MicroBatch]) -> list[HeadLogits]:
        """Return every micro-batch's last hidden states with the output head; as `evaluate`."""
        logits = self.evaluate(batches, lambda responses: responses.logits)
        if logits and self.residency.moves:  # the logits are computed when the model has left
            weight = logits[0].weight.clone()
            logits = [replace(head_logits, head=weight) for head_logits in logits]
        return logits

    def named_weights(self) -> dict[str, Tensor]:
        """Return this rank's tensors, not copies, by "chunk/parameter" as in parallel.weights."""
        self.residency.hold()
        latent = self.bridge.config.multi_latent_attention
        return {
            f"{number}/{names.plain_name(name, latent)}": tensor
            for number, chunk in enumerate(self.chunks)
            for name, tensor in chunk.state_dict().items()
            if not name.endswith("_extra_state")  # TransformerEngine's, of fp8
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole tensor under its Hugging Face name. Collective over all ranks."""
        self.residency.hold()
        return hugging_face_weights.stream_weights(self.bridge, self.chunks)

    def _build_chunks(self) -> list[GPTModel]:
        """Build this rank's parts of the model; a subclass may replace the head."""
        return build_chunks(self.bridge)

    def _run(
        self, batches: list[MicroBatch], loss: LossFunction, forward_only: bool = True
    ) -> list[Any]:
        """Run Megatron's schedule over all micro-batches and pipeline stages."""

        def forward(iterator: Iterator[MicroBatch], module: torch.nn.Module) -> tuple:
            self._batch = batch = next(iterator)
            options: dict[str, Any] = {"packed_seq_params": batch.row}
            if self.bridge.config.bf16:
                options["fp32_output"] = False
            output = module(batch.tokens, batch.positions, None, **options)

            def reduce(computed: Tensor) -> tuple:
                assert self._hidden is not None
                logits: Tensor | HeadLogits = computed.squeeze(0)
                if not self._training:
                    weight = self.chunks[-1].output_layer.weight
                    precise = self.settings.precise_head
                    logits = HeadLogits(self._hidden, weight, precise=precise)
                value, returned = loss(Responses(logits, batch))
                return value, torch.tensor(1, dtype=torch.int), returned

            return output, reduce

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in self.modules],
            model=self.modules,
            num_microbatches=len(batches),
            seq_length=batches[0].row.tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _select_responses(self, _head: torch.nn.Module, arguments: tuple) -> tuple:
        """Pass only the hidden states that predict response tokens to the head.

        When not training pass none: the logits are then computed chunk by chunk from the hidden
        states kept here.
        """
        assert self._batch is not None
        (hidden,) = arguments
        if self.bridge.config.sequence_parallel:
            # The head sums its input's gradient over the ranks itself.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden[self._batch.predicts]
        self._hidden = hidden.squeeze(1)
        return (hidden if self._training else hidden[:0],)


class TrainedPolicy(Policy):
    """A policy with gradients, summed over micro-batches and ranks and never rescaled."""

    def __init__(
        self,
        settings: ModelSettings,
        layout: LayoutSettings,
        optimizer: OptimizerSettings,
        steps: int,
        losses: RoutingLossSettings,
    ) -> None:
        check_optimizer(this_machine(), optimizer)
        super().__init__(settings, layout)
        config = self.bridge.config
        self.losses = routing.RoutingLosses(losses, self.routers)
        self._memory: RouterMemory | None = None
        # megatron-core can only shard Adam's state.
        sharded = layout.distributed_optimizer and optimizer.algorithm == "adam"
        buckets = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=sharded,
            **data_parallel_flags(this_machine(), settings),
        )
        self.modules = [DistributedDataParallel(config, buckets, module) for module in self.modules]
        # Models in its checkpoints, by name: averages of it, and models trained with it.
        self.averages: dict[str, Policy] = {}
        self.companions: dict[str, TrainedPolicy] = {}
        self.optimizer, self.schedule = _build_optimizer(optimizer, self.modules, sharded, steps)
        # As Megatron does, without its division by a token count.
        config.finalize_model_grads_func = lambda model, _, **keywords: finalize_model_grads(
            model, None, **keywords
        )
        config.grad_scale_func = self.optimizer.scale_loss
        self.host_state = HostState(self.optimizer, optimizer.cpu_offload)
        self.residency = Residency(self.chunks, self.modules, self.optimizer, self.host_state.bytes)
        if buckets.overlap_grad_reduce:
            # Buckets are summed in the backward pass of the last micro-batch alone.
            syncs = [module.no_sync for module in self.modules]
            config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]

    def weights_changed(self) -> None:
        """Copy low-precision weights to the optimizer's fp32 master weights."""
        self.residency.hold(STATE)
        self.optimizer.reload_model_params()
        for chained in self.optimizer.chained_optimizers:
            if chained.config.use_precision_aware_optimizer:
                _reload_masters(chained.optimizer)

    def accumulate(self, batches: list[MicroBatch], loss: LossFunction, tokens: float) -> list[Any]:
        """Run forward and backward on all micro-batches; all ranks together have `tokens` tokens.

        The buffers then hold gradients summed over micro-batches and ranks. Padding is not in
        `tokens`. Returns the second results of `loss` on the last pipeline stage, elsewhere [].

        Waits for: every rank, since gradients are summed over the data-parallel ranks.
        Unblocked by: the same call on all of them, with equally many micro-batches.
        """
        self.residency.hold(ALL)
        for module, chunk in zip(self.modules, self.chunks, strict=True):
            module.zero_grad_buffer()
            chunk.train()
        self.optimizer.zero_grad()
        self.losses.start(tokens, len(batches))
        if self.losses.counts_first:
            self._training = False
            with self.losses.counting(), torch.no_grad():
                self._run(batches, lambda _: (torch.zeros((), device=device()), None))
        self._training = True
        return self._run(batches, loss, forward_only=False)

    def remember_routing(self) -> None:
        """Record the routers' log-probabilities with every row evaluated later."""
        self._memory = RouterMemory(self.routers, len(self.routed_layers))

    def evaluate(self, batches: list[MicroBatch], function: Evaluation) -> list[Any]:
        """Evaluate as `Policy.evaluate`; record the routing after `remember_routing`."""
        with self._memory.during("remember") if self._memory else nullcontext():
            return super().evaluate(batches, function)

    def router_movement(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the change of the routers since the batches were evaluated; as `evaluate`.

        The movement is the mean over layers and recorded experts of |log p - recorded log p|, in
        nats, at the token that predicts each response token; fp32 [B, R] per micro-batch.
        """
        assert self._memory is not None, "remember_routing was not called"
        with self._memory.during("compare"):
            last = super().evaluate(batches, lambda _: True)
        moved = [self._memory.movement(batch) for batch in batches]
        return [
            batch.spread(tokens[batch.predicts])
            for batch, tokens, _ in zip(batches, moved, last, strict=False)
        ]

    def step(self) -> float:
        """Clip, update and advance the schedule; return the gradient norm before clipping.

        Waits for: every rank, whose gradients the norm is of.
        Unblocked by: the call on each, after `accumulate`.
        """
        if "gradients" not in self.residency.on_device:
            raise RuntimeError("the gradients left the device before the step: call accumulate")
        _, norm, _ = self.optimizer.step()
        self.schedule.step(1)
        return float(norm)

    def routing_metrics(self) -> dict[str, float]:
        """Return the routing losses of the last step. Collective over all ranks."""
        return self.losses.metrics(len(self.routed_layers))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]


class ValueHead(torch.nn.Module):
    """The linear head from hidden states to values, initially 0, replacing the vocabulary head.

    It is replicated on every tensor-parallel rank. All of them receive equal hidden states and
    compute equal gradients, so no sum over ranks is needed.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        weight = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device())
        self.weight = torch.nn.Parameter(weight)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Return fp32 [n, 1, 1] for hidden [n, 1, H]; the signature is megatron-core's."""
        return _linear(hidden, self.weight), None


class ValueModel(TrainedPolicy):
    """A critic, trained like a policy with losses on `values`."""

    def values(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the values of every micro-batch; as `evaluate`."""
        return self.evaluate(batches, values)

    def _build_chunks(self) -> list[GPTModel]:
        chunks = super()._build_chunks()
        if chunks[-1].post_process:
            chunks[-1].output_layer = ValueHead(self.bridge.config)
        return chunks


def values(responses: Responses) -> Tensor:
    """Return the value of the text before every response token, fp32 [B, R].

    Identical on all tensor- and context-parallel ranks; differentiable where the model trains.
    """
    outputs = responses.logits
    if isinstance(outputs, HeadLogits):
        outputs = _linear(outputs.hidden, outputs.weight)
    return responses.batch.spread(outputs.squeeze(1))


def _linear(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(hidden.float(), weight.float())


def _reload_masters(adam: Any) -> None:
    """Copy weights to the masters inside TransformerEngine's Adam; new ones copy them anyway."""
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        if "master_param" in adam.state[parameter]:
            adam.set_scaled_state(parameter, "master_param", parameter.detach().float())


def _moments(settings: OptimizerSettings) -> dict[str, Any]:
    """Return the fields of megatron-core's OptimizerConfig for moments in bf16."""
    if not settings.precision_aware:
        return {}
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        # A master of 16 bits beside the weight's would be no fp32 number in a checkpoint, which
        # every kind of optimizer reads.
        "store_param_remainders": False,
    }


def _build_optimizer(
    settings: OptimizerSettings, modules: list[Any], sharded: bool, steps: int
) -> tuple[Any, OptimizerParamScheduler]:
    config = OptimizerConfig(
        optimizer=settings.algorithm,
        lr=settings.learning_rate,
        min_lr=settings.learning_rate * settings.final_ratio,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        sgd_momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_norm,
        bf16=modules[0].config.bf16,
        params_dtype=modules[0].config.params_dtype,
        use_distributed_optimizer=sharded,
        **_moments(settings),
    )
    optimizer = get_megatron_optimizer(config, modules)
    return optimizer, OptimizerParamScheduler(
        optimizer,
        init_lr=settings.learning_rate / max(1, settings.warmup_steps),  # the first step counts
        max_lr=settings.learning_rate,
        min_lr=settings.learning_rate * settings.final_ratio,
        lr_warmup_steps=min(settings.warmup_steps, steps - 1),
        lr_decay_steps=steps,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
