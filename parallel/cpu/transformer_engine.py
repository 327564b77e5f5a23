"""Stand-ins for what megatron-core 0.16.1 takes from TransformerEngine, with or without CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam


def stand_in() -> None:
    """Give megatron-core's modules the names that only TransformerEngine would define."""
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    # The router's forward uses the name unguarded, and without TransformerEngine nothing binds it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    # The flag is true also where TransformerEngine's classes are mocks.
    latent.HAVE_TE = isinstance(latent.TELinear, type)


def count_adam_steps_by_group() -> None:
    """Use our AdamW where neither TransformerEngine nor apex is installed.

    megatron-core would use torch's, which counts steps per parameter. Its fully reshardable format
    drops these counts when saving and requires them when loading (KeyError: 'step'), and a rank
    that owns no parameter of a group has no count to save. A count per group avoids both.
    """
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = GroupStepAdam, False
        distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


class GroupStepAdam(torch.optim.AdamW):
    """torch's AdamW, bit for bit, with `step` in the parameter group instead of in every state.

    Empty groups have it too, so that all ranks save the same keys.
    """

    def __init__(self, params: Iterable[Any], *, adam_w_mode: bool = True, **options: Any) -> None:
        """Decouple the weight decay from the gradient if `adam_w_mode`, as apex does."""
        super().__init__(params, **options)
        self.adam_w_mode = adam_w_mode
        for group in self.param_groups:
            group["step"] = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; skip torch's Adam, which requires a step for every parameter."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is ignored."""
        for group in self.param_groups:
            done = group["step"]
            group["step"] = done + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][name] = torch.zeros_like(parameter)
            states = [self.state[parameter] for parameter in parameters]
            adam(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                max_exp_avg_sqs=[],
                state_steps=[torch.tensor(float(done)) for _ in parameters],
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                maximize=False,
                **{name: group[name] for name in ("lr", "weight_decay", "eps")},
            )
