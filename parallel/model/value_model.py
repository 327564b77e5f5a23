"""The value model of a critic: the policy's family and layout, with one value per token."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch.nn import functional

from parallel.batch import MicroBatch, Responses
from parallel.device import device
from parallel.model.policy import TrainedPolicy
from parallel.model.vocabulary import HeadLogits


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
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return fp32 [n, 1, 1] for hidden [n, 1, H]; the signature is megatron-core's."""
        return _linear(hidden, self.weight), None


class ValueModel(TrainedPolicy):
    """A critic, trained like a policy with losses on `values`."""

    def values(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        """Return the values of every micro-batch; as `evaluate`."""
        return self.evaluate(batches, values)

    def _build_chunks(self) -> list[GPTModel]:
        chunks = super()._build_chunks()
        if chunks[-1].post_process:
            chunks[-1].output_layer = ValueHead(self.bridge.config)
        return chunks


def values(responses: Responses) -> torch.Tensor:
    """Return the value of the text before every response token, fp32 [B, R].

    Identical on all tensor- and context-parallel ranks; differentiable where the model trains.
    """
    found = responses.logits
    if isinstance(found, HeadLogits):
        found = _linear(found.hidden, found.weight)
    return responses.batch.spread(found.squeeze(1))


def _linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden.float(), weight.float())
