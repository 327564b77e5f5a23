"""A policy: a model under the stage's layout, and, when it trains, its optimizer and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from parallel import hugging_face, routing, vocabulary
from parallel.attention import PackedPositions
from parallel.batch import MicroBatch
from parallel.model import build_bridge, build_model, initialize
from parallel.settings import ModelSettings, OptimizerSettings

# (logits [B, T, vocabulary / TP], micro-batch) -> (loss already divided by its global denominator,
# what the caller wants back, detached)
LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Any]]


class Policy:
    """A model that is only read: a reference, a teacher, or the base of a trained policy."""

    def __init__(self, settings: ModelSettings) -> None:
        self.bridge = build_bridge(settings)
        self.model = build_model(settings, self.bridge)
        self.chunks = [self.model]
        self.rotary = PackedPositions(self.model.rotary_pos_emb)
        self.routers = routing.adopt_routers(self.model)
        self.settings = settings

    def start_fresh(self, seed: int) -> None:
        """Take the weights a run starts from: a Hugging Face checkpoint's, or random ones."""
        if self.settings.initial_weights is not None:
            hugging_face.load_weights(self.bridge, self.model, self.settings.initial_weights)
        else:
            initialize(self.model, self.settings, seed)

    def logits(self, batch: MicroBatch, module: torch.nn.Module | None = None) -> torch.Tensor:
        """The logits that predict every response token, [B, T, vocabulary / TP].

        The batch's routes are replayed where it carries some.
        """
        routing.replay(self.routers, batch.routes)
        self.rotary.positions = batch.positions
        packed = (module or self.model)(batch.tokens, batch.positions, batch.attention)
        return packed.flatten(0, 1)[batch.position]

    @torch.no_grad()
    def target_logprobs(self, batches: list[MicroBatch], temperature: float) -> list[torch.Tensor]:
        """log pi of every target, fp32 [B, T] a micro-batch, meaningful under its mask."""
        return self.evaluate(
            batches,
            lambda logits, batch: vocabulary.gather_targets(
                vocabulary.log_softmax(logits, temperature), batch.targets
            ),
        )

    @torch.no_grad()
    def evaluate(
        self, batches: list[MicroBatch], function: Callable[[torch.Tensor, MicroBatch], Any]
    ) -> list[Any]:
        """`function(logits, batch)` of every micro-batch, without gradients."""
        self.model.eval()
        return [function(self.logits(batch), batch) for batch in batches]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor under its Hugging Face name, whole; a collective over all ranks."""
        return hugging_face.stream_weights(self.bridge, self.model)


class TrainedPolicy(Policy):
    """A policy with gradients, summed over micro-batches and ranks and never rescaled."""

    def __init__(
        self,
        settings: ModelSettings,
        optimizer: OptimizerSettings,
        steps: int,
        distributed_optimizer: bool = False,
    ) -> None:
        super().__init__(settings)
        config = self.bridge.config
        # megatron-core's distributed optimizer knows only Adam.
        distributed = distributed_optimizer and optimizer.algorithm == "adam"
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=distributed,
            ),
            self.model,
        )
        self.optimizer = get_megatron_optimizer(
            _optimizer_config(optimizer, distributed), [self.ddp]
        )
        self.schedule = _schedule(self.optimizer, optimizer, steps)
        config.finalize_model_grads_func = _sum_gradients
        config.grad_scale_func = self.optimizer.scale_loss

    def accumulate(self, batches: list[MicroBatch], loss: LossFunction) -> list[Any]:
        """Forward and backward through all micro-batches; returns what `loss` gave beside values.

        The gradients left in the buffers are the sum over micro-batches and data-parallel ranks.
        """
        self.model.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

        def forward(iterator: Iterator[MicroBatch], module: torch.nn.Module) -> tuple:
            batch = next(iterator)

            def reduce(logits: torch.Tensor) -> tuple:
                value, metrics = loss(logits, batch)
                return value, torch.tensor(1, dtype=torch.int), metrics

            return self.logits(batch, module), reduce

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=self.ddp,
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1],
            micro_batch_size=batches[0].tokens.shape[0],
            forward_only=False,
        )

    def step(self) -> float:
        """Clip, update, advance the schedule. Returns the gradient's norm before clipping."""
        _, norm, _ = self.optimizer.step()
        self.schedule.step(1)
        return float(norm)

    @property
    def learning_rate(self) -> float:
        """The rate the next step will use."""
        return self.optimizer.param_groups[0]["lr"]


def data_rank() -> tuple[int, int]:
    """This rank's place among the data-parallel ranks, and their number."""
    return (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )


def _sum_gradients(model: list[Any], _tokens: torch.Tensor | None, **keywords: Any) -> None:
    """Megatron's reduction of gradients, without its own division by a token count."""
    finalize_model_grads(model, None, **keywords)


def _optimizer_config(settings: OptimizerSettings, distributed: bool) -> OptimizerConfig:
    return OptimizerConfig(
        use_distributed_optimizer=distributed,
        optimizer=settings.algorithm,
        lr=settings.learning_rate,
        min_lr=settings.learning_rate * settings.final_ratio,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        sgd_momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_norm,
    )


def _schedule(optimizer: Any, settings: OptimizerSettings, steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
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
