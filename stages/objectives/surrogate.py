"""The tokens that a ratio reads, the surrogate it returns, and PPO's clip (arXiv 1707.06347).

Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from parallel.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0

# The ratio is clipped to 1 - clip_low, which must not be below 0.
BelowOne = Annotated[float, Field(gt=0, le=1)]


class RatioBase(Settings):
    """The base of a ratio's settings; the class variables say what it needs.

    `per_response`: all tokens of a response get one gradient. `needs_router_shift`: it reads
    `Tokens.router_movement`, which costs a forward pass an update.
    """

    if TYPE_CHECKING:
        name: str

    per_response: ClassVar[bool] = False
    needs_router_shift: ClassVar[bool] = False

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each contradiction between these settings."""
        yield from ()


class Clipped(RatioBase):
    """A ratio with PPO's clip, and a second bound where the advantage is negative."""

    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="upper bound of the ratio where the advantage is negative, such as 3; null: no"
        " bound",
    )


@dataclass(frozen=True)
class Tokens:
    """The inputs of the loss of B responses of at most T tokens, each [B, T] unless it says more.

    Log-probabilities are of the sampled tokens, in nats: of the policy, with gradient; of the
    policy that sampled, as the trainer recomputes it (pi_old) and as the engine reported it (mu);
    and of the reference. `mask` is bool, true on response tokens; elsewhere any value may stand.

    `drawn_log_probs`, for the estimator `unbiased_k3`: pi_old's, but mu's where older weights
    sampled a token; None means pi_old's everywhere.
    `weights`, of `stages.objectives.correction`, multiply the surrogate and not the KL.
    `router_movement`: mean |log p - log p_old| in nats, over layers and the experts that the old
    router chose.
    `reference_kl` and `entropy`, over the whole vocabulary, have gradient.
    `length_weights` [B], of the aggregation `lambda`, multiply everything.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    engine_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    drawn_log_probs: Tensor | None = None
    weights: Tensor | None = None
    router_movement: Tensor | None = None
    reference_log_probs: Tensor | None = None
    reference_kl: Tensor | None = None
    entropy: Tensor | None = None
    length_weights: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """The log-ratio log pi_theta - log pi_old of every token, in nats."""
        return self.log_probs - self.old_log_probs

    def cleared(self) -> Tokens:
        """Return the tokens with 0 where the mask is false: NaN times 0 would reach a gradient."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, values in given.items():
            if values is not None and name not in ("mask", "length_weights"):
                given[name] = values.masked_fill(~self.mask, 0.0)
        return Tokens(**given)


@dataclass(frozen=True)
class Surrogate:
    """The loss, the ratio and the clip of every token, each [B, T]; unspecified where masked.

    `clipped` (bool) is true where the clip binds.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the argument clamped to +-20: one stray token must not overflow a batch."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Surrogate:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A), elementwise over equal shapes.

    With `dual`, c, it is max(min(...), c A) where A is negative: a token that became much likelier
    cannot outweigh a batch (dual clip, arXiv 1912.09729). There is no gradient where a clip binds.
    """
    free = ratio * advantages
    bound = ratio.clamp(1 - low, 1 + high) * advantages
    gain, clipped = free.minimum(bound), bound < free
    if dual is not None:
        least = (dual * advantages).where(advantages < 0, -float("inf"))
        gain, clipped = gain.maximum(least), clipped | (gain < least)
    return Surrogate(loss=-gain, ratio=ratio, clipped=clipped)
