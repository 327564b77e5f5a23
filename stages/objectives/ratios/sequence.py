"""Group Sequence Policy Optimization (GSPO): one ratio a response (arXiv 2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.objectives.registry import AboveZero, ratio
from stages.objectives.surrogate import (
    BelowOne,
    Clipped,
    Surrogate,
    Tokens,
    bounded_exp,
    clipped_surrogate,
    sequence_means,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class SequenceRatioSettings(Clipped):
    """One ratio a response and its clip (GSPO's).

    The published bounds are for responses of thousands of tokens: a mean log-ratio shrinks with the
    square root of their number, so 3e-4 at 4,000 tokens is about 4e-3 at 20.
    """

    per_response: ClassVar[bool] = True

    name: Literal["sequence"] = "sequence"
    clip_low: BelowOne = Field(default=3e-4, description="ratios are clipped to 1 - clip_low")
    clip_high: AboveZero = Field(default=4e-4, description="ratios are clipped to 1 + clip_high")


@ratio(SequenceRatioSettings, source="arXiv 2507.18071")
def sequence_ratio(tokens: Tokens, settings: SequenceRatioSettings) -> Surrogate:
    """Return min(s A, clip(s) A), s = exp(mean_t log-ratio), at each token of its response.

    Every token of a response carries the response's loss, so its mean over the tokens, and with it
    the aggregation `sequence_mean`, is exactly the loss of GSPO.

    Example: one response of two tokens, of ratios 1.5 and 0.9, and advantage 1:
        >>> import torch
        >>> new, old = torch.tensor([[0.6, 0.225]]).log(), torch.tensor([[0.4, 0.25]]).log()
        >>> one = torch.ones(1, 2)
        >>> tokens = Tokens(new, old, old, advantages=one, mask=one > 0)
        >>> surrogate = sequence_ratio(tokens, SequenceRatioSettings())
        >>> surrogate.ratio, surrogate.loss  # the root of 1.5 x 0.9, clipped to 1.0004
        (tensor([[1.1619, 1.1619]]), tensor([[-1.0004, -1.0004]]))
    """
    ratio = response_ratio(tokens).expand_as(tokens.logprobs)
    return clipped_surrogate(ratio, tokens.advantages, settings)


def response_ratio(tokens: Tokens) -> Float[Tensor, "responses 1"]:
    """Return s_i of every response, [B, 1]."""
    return bounded_exp(sequence_means(tokens.log_ratio, tokens.mask)).unsqueeze(-1)
