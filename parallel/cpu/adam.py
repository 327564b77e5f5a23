"""An AdamW that counts its steps per parameter group, as TransformerEngine's and apex's do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam


class GroupStepAdam(torch.optim.AdamW):
    """torch's AdamW, bit for bit, with `step` in the parameter group instead of in every state.

    Empty groups have it too, so that all ranks save the same keys.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        """Decouple the weight decay from the gradient if `adam_w_mode`, as apex does."""
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
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
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self._update(group, parameters, done)

    def _update(self, group: dict[str, Any], parameters: list[Any], done: int) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        adam(
            parameters,
            [parameter.grad for parameter in parameters],
            [self.state[parameter]["exp_avg"] for parameter in parameters],
            [self.state[parameter]["exp_avg_sq"] for parameter in parameters],
            max_exp_avg_sqs=[],
            state_steps=[torch.tensor(float(done)) for _ in parameters],
            decoupled_weight_decay=self.adam_w_mode,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
