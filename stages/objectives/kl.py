"""Estimators of KL(pi_theta || pi_ref) from the sampled tokens, and the coefficient's controller.

Every estimator takes log-probabilities [...] in nats, of the policy, the reference and the policy
that sampled, and returns one value a token. d = log pi_ref - log pi_theta throughout.
Source of k1, k2, k3: Schulman, "Approximating KL divergence", 2020. The estimator `full` is not
among them: the KL over all ids that a token is sampled from is computed where the logits are
(`parallel.model.vocabulary`), and has gradient through all of them. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from parallel.settings import Fraction, Settings
from stages.objectives.registry import AboveZero, kl_estimator
from stages.objectives.surrogate import bounded_exp

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

AVERAGE = "ema"  # the reference that is a moving average of the policy
SCHULMAN = "Schulman, http://joschu.net/blog/kl-approx.html"


class KLSettings(Settings):
    """The penalty for leaving another model; a coefficient of 0 computes no reference at all."""

    coefficient: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="coefficient of the KL; 0 computes no reference"
    )
    estimator: Literal["k1", "k2", "k3", "unbiased_k3", "full"] = Field(
        default="k3",
        description="estimator of the KL, per token; full is exact. With top_p or top_k all are of"
        " the distributions over the ids that sampling kept",
    )
    reference: str = Field(
        default="parent",
        description="model that the KL is measured to: parent, ema, or a stage, such as cold_start,"
        " or a path; a block with for_each: domain is each domain's own stage of it",
    )
    ema_decay: Fraction = Field(
        default=0.99, description="weight of the old average at every update of the reference ema"
    )
    target: AboveZero | None = Field(
        default=None,
        description="nats a token that a controller holds the KL at by changing the coefficient;"
        " null keeps the coefficient",
    )

    @property
    def needs_logits(self) -> bool:
        """True where the reference's logits are read, and not only its log-probabilities."""
        return self.estimator == "full"

    @property
    def needs_sampling_logprobs(self) -> bool:
        """True where log-probabilities of the policy that sampled each token are read."""
        return self.estimator == "unbiased_k3"

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each contradiction between these settings."""
        if self.target is not None and self.coefficient == 0:
            yield (
                "target",
                f"{self.target:g} is never reached from kl.coefficient = 0, which is multiplied;"
                " start above 0",
            )


@kl_estimator("k1", SCHULMAN)
def k1(
    logprobs: Float[Tensor, "*shape"],
    reference: Float[Tensor, "*shape"],
    sampling: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return -d: unbiased as a measurement; as a loss its gradient averages to nothing.

    Example: the policy gives a token 0.6 and the reference 0.3, so d = log 0.5:
        >>> import torch
        >>> policy, reference, sampler = torch.tensor([[0.6], [0.3], [0.5]]).log()
        >>> k1(policy, reference, sampler)
        tensor([0.6931])
    """
    return logprobs - reference


@kl_estimator("k2", SCHULMAN)
def k2(
    logprobs: Float[Tensor, "*shape"],
    reference: Float[Tensor, "*shape"],
    sampling: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return d^2 / 2: biased, never negative; on-policy its gradient is that of the true KL.

    Example: the policy gives a token 0.6 and the reference 0.3, so d = log 0.5:
        >>> import torch
        >>> policy, reference, sampler = torch.tensor([[0.6], [0.3], [0.5]]).log()
        >>> k2(policy, reference, sampler)
        tensor([0.2402])
    """
    return (reference - logprobs).square() / 2


@kl_estimator("k3", f"{SCHULMAN}; GRPO, arXiv 2402.03300")
def k3(
    logprobs: Float[Tensor, "*shape"],
    reference: Float[Tensor, "*shape"],
    sampling: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return e^d - d - 1: unbiased, never negative.

    Example: the policy gives a token 0.6 and the reference 0.3, so d = log 0.5:
        >>> import torch
        >>> policy, reference, sampler = torch.tensor([[0.6], [0.3], [0.5]]).log()
        >>> k3(policy, reference, sampler)  # 0.5 + 0.6931 - 1
        tensor([0.1931])
    """
    difference = reference - logprobs
    return bounded_exp(difference) - difference - 1


@kl_estimator("unbiased_k3", "DeepSeek-V3.2, arXiv 2512.02556")
def unbiased_k3(
    logprobs: Float[Tensor, "*shape"],
    reference: Float[Tensor, "*shape"],
    sampling: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return pi_theta / pi_sampling times k3, with gradient through both: unbiased off-policy.

    Example: the policy gives a token 0.6 and the reference 0.3, so d = log 0.5:
        >>> import torch
        >>> policy, reference, sampler = torch.tensor([[0.6], [0.3], [0.5]]).log()
        >>> unbiased_k3(policy, reference, sampler)  # 0.6 / 0.5 times k3
        tensor([0.2318])
    """
    return bounded_exp(logprobs - sampling) * k3(logprobs, reference, sampling)


def kl_controller(coefficient: float, kl: float, target: float) -> float:
    """Return coefficient (1 + 0.1 e), with e = (kl - target) / target clipped to +-0.2.

    So an update changes it by at most 2 %. `kl`, that of the last update, and `target` are in nats
    a token. Source: the proportional controller of arXiv 1909.08593, section 2.2.

    Example: a KL 10 % above its target raises the coefficient by 1 %:
        >>> round(kl_controller(0.5, kl=0.11, target=0.1), 6)
        0.505
    """
    return coefficient * (1 + 0.1 * max(-0.2, min((kl - target) / target, 0.2)))
