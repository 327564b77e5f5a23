"""The losses of preference pairs: DPO and IPO, functions of four log-probabilities of each pair.

d = (log pi(chosen) - log ref(chosen)) - (log pi(rejected) - log ref(rejected)), the difference of
the two log-ratios in nats, is all that a loss reads. beta times a log-ratio is the reward that DPO
gives a response. Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.objectives.registry import PREFERENCES, AboveZero, AlgorithmSettings, preference

if TYPE_CHECKING:
    from jaxtyping import Float, Real
    from torch import Tensor


class PreferenceBase(AlgorithmSettings):
    """The settings that all losses of pairs have."""

    beta: AboveZero = Field(
        default=0.1, description="weight of the log-ratios; larger stays nearer to the reference"
    )
    logprobs: Literal["sum", "mean"] = Field(
        default="sum",
        description="log-probability of a response: the sum over its tokens, or their mean, so that"
        " length does not count",
    )


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of P pairs' responses, each [P], in nats; the policy's have gradient.

    `chosen_tokens` and `rejected_tokens` are the numbers of tokens that the sums are over.
    """

    chosen: Float[Tensor, " pairs"]
    rejected: Float[Tensor, " pairs"]
    reference_chosen: Float[Tensor, " pairs"]
    reference_rejected: Float[Tensor, " pairs"]
    chosen_tokens: Real[Tensor, " pairs"]
    rejected_tokens: Real[Tensor, " pairs"]

    def log_ratios(
        self, settings: PreferenceBase
    ) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
        """Return log pi - log ref of the chosen and of the rejected responses, [P] each."""
        chosen_ratio = self.chosen - self.reference_chosen
        rejected_ratio = self.rejected - self.reference_rejected
        if settings.logprobs == "mean":
            chosen_ratio, rejected_ratio = (
                chosen_ratio / self.chosen_tokens,
                rejected_ratio / self.rejected_tokens,
            )
        return chosen_ratio, rejected_ratio


@dataclass(frozen=True)
class PreferenceLoss:
    """One shard's share of the step's loss, to call backward on, and its sums over pairs."""

    loss: Float[Tensor, ""]
    sums: dict[str, float]


def preference_loss(pairs: PairLogprobs, count: float, settings: PreferenceBase) -> PreferenceLoss:
    """Return the loss of one micro-batch's pairs, divided by the `count` of the whole step's."""
    chosen_ratio, rejected_ratio = pairs.log_ratios(settings)
    losses: Tensor = PREFERENCES[settings.name].function(chosen_ratio - rejected_ratio, settings)
    loss = losses.sum() / max(count, 1)
    better, worse = (
        settings.beta * log_ratio.detach() for log_ratio in (chosen_ratio, rejected_ratio)
    )
    sums = {
        "loss": losses.detach().sum(),
        "reward_chosen": better.sum(),
        "reward_rejected": worse.sum(),
        "reward_margin": (better - worse).sum(),
        "reward_accuracy": (better > worse).sum(),
    }
    return PreferenceLoss(loss, {name: float(value) for name, value in sums.items()})


class SigmoidSettings(PreferenceBase):
    """DPO: the Bradley-Terry likelihood that the chosen response is preferred."""

    name: Literal["sigmoid"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0,
        description="probability that a pair is labelled the wrong way round (conservative DPO)",
    )


@preference(SigmoidSettings, source="DPO, arXiv 2305.18290; label smoothing: cDPO, 2023")
def sigmoid(
    difference: Float[Tensor, " pairs"], settings: SigmoidSettings
) -> Float[Tensor, " pairs"]:
    """Return -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d), s the label smoothing.

    Example: the policy prefers the chosen response by 10 nats more than the reference does:
        >>> import torch
        >>> sigmoid(torch.tensor([10.0]), SigmoidSettings(beta=0.1))  # -log sigmoid(1)
        tensor([0.3133])
    """
    logits, smoothing = settings.beta * difference, settings.label_smoothing
    return -(1 - smoothing) * _log_sigmoid(logits) - smoothing * _log_sigmoid(-logits)


def _log_sigmoid(values: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
    # torch's logsigmoid would need torch, which this module must not import; a plain
    # sigmoid().log() is -inf at -1e3.
    return -values.new_zeros(()).logaddexp(-values)


class IpoSettings(PreferenceBase):
    """IPO: a regression of the difference to 1 / (2 beta), so that it cannot grow without bound."""

    name: Literal["ipo"] = "ipo"
    # The paper's results are of means, as TRL's documentation has from its authors.
    logprobs: Literal["sum", "mean"] = Field(
        default="mean", description="as for sigmoid, whose default is sum"
    )


@preference(IpoSettings, source="IPO, arXiv 2310.12036")
def ipo(difference: Float[Tensor, " pairs"], settings: IpoSettings) -> Float[Tensor, " pairs"]:
    """Return (d - 1 / (2 beta))^2.

    Example:
        >>> import torch
        >>> ipo(torch.tensor([3.0]), IpoSettings(beta=0.25))  # (3 - 2)^2
        tensor([1.])
    """
    return (difference - 1 / (2 * settings.beta)).square()


if TYPE_CHECKING:
    PreferenceSettings = PreferenceBase
else:
    PreferenceSettings = PREFERENCES.settings_union(default="sigmoid")
