"""The ratio of PPO and GRPO: one for each token (arXiv 2402.03300; clip-higher: 2503.14476)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.objectives.registry import AboveZero, ratio
from stages.objectives.surrogate import (
    BelowOne,
    Clipped,
    Surrogate,
    Tokens,
    bounded_exp,
    clipped_surrogate,
)


class TokenRatioSettings(Clipped):
    """One ratio a token and its clip (DAPO's)."""

    name: Literal["token"] = "token"
    clip_low: BelowOne = Field(default=0.2, description="ratios are clipped to 1 - clip_low")
    clip_high: AboveZero = Field(default=0.28, description="ratios are clipped to 1 + clip_high")


@ratio(TokenRatioSettings, source="arXiv 2402.03300, 2503.14476")
def token_ratio(tokens: Tokens, settings: TokenRatioSettings) -> Surrogate:
    """Return min(r_t A, clip(r_t) A) of r_t = exp(log pi_theta - log pi_old).

    Example: one response of two tokens, of ratios 1.5 and 0.9, and advantage 1:
        >>> import torch
        >>> new, old = torch.tensor([[0.6, 0.225]]).log(), torch.tensor([[0.4, 0.25]]).log()
        >>> one = torch.ones(1, 2)
        >>> tokens = Tokens(new, old, old, advantages=one, mask=one > 0)
        >>> surrogate = token_ratio(tokens, TokenRatioSettings())  # clipped to 1.28
        >>> surrogate.loss, surrogate.clipped
        (tensor([[-1.2800, -0.9000]]), tensor([[ True, False]]))
    """
    ratio = bounded_exp(tokens.log_ratio)
    return clipped_surrogate(ratio, tokens.advantages, settings)
