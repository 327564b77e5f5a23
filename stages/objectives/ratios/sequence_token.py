"""GSPO-token: the response's ratio with each token's own gradient (arXiv 2507.18071)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.objectives.ratios.sequence import response_ratio
from stages.objectives.registry import AboveZero, ratio
from stages.objectives.surrogate import (
    BelowOne,
    Clipped,
    Surrogate,
    Tokens,
    bounded_exp,
    clipped_surrogate,
)


class SequenceTokenRatioSettings(Clipped):
    """The ratio of the response at every token, with each token's own gradient (GSPO-token's)."""

    name: Literal["sequence_token"] = "sequence_token"
    clip_low: BelowOne = Field(default=3e-4, description="ratios are clipped to 1 - clip_low")
    clip_high: AboveZero = Field(default=4e-4, description="ratios are clipped to 1 + clip_high")


@ratio(SequenceTokenRatioSettings, source="arXiv 2507.18071")
def sequence_token_ratio(tokens: Tokens, settings: SequenceTokenRatioSettings) -> Surrogate:
    """Return min(s A, clip(s) A) of s_it = sg[s_i] pi_theta / sg[pi_theta], token by token.

    It equals `sequence` where the tokens of a response share one advantage.

    Example: one response of two tokens, of ratios 1.5 and 0.9, and advantage 1:
        >>> import torch
        >>> new, old = torch.tensor([[0.6, 0.225]]).log(), torch.tensor([[0.4, 0.25]]).log()
        >>> one = torch.ones(1, 2)
        >>> tokens = Tokens(new, old, old, advantages=one, mask=one > 0)
        >>> surrogate = sequence_token_ratio(tokens, SequenceTokenRatioSettings(clip_high=0.2))
        >>> surrogate.ratio, surrogate.loss  # the root of 1.5 x 0.9, within the clip
        (tensor([[1.1619, 1.1619]]), tensor([[-1.1619, -1.1619]]))
    """
    # 1 in value; its gradient is that of the token's own log-probability.
    unit = bounded_exp(tokens.logprobs - tokens.logprobs.detach())
    ratio = response_ratio(tokens).detach() * unit
    return clipped_surrogate(ratio, tokens.advantages, settings)
