"""The equations of the papers, in the papers' own form: products, min, clip and stop-gradients.

An oracle for the audit and for the product. It shares no step of theirs: gradients are autograd's,
ratios are quotients of probabilities, and means are written as roots of products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOOR = 1e-6  # beside a standard deviation, verl's epsilon


@dataclass(frozen=True)
class PublishedResponse:
    """One response's n tokens, each [n], log-probabilities in nats; `policy` has gradient."""

    policy: Tensor
    old: Tensor
    engine: Tensor
    reference: Tensor
    advantages: Tensor
    movement: Tensor


def policy_losses(
    response: PublishedResponse, objective: dict[str, Any], corrected: bool
) -> Tensor:
    """Return the loss of every token [n]; their mean is the objective of the response, negated."""
    losses = -_objective(response, objective["ratio"])
    if corrected:
        losses = losses * correction(response, objective["correction"])
    if objective["sequence_mask"]["enabled"]:
        losses = losses * off_policy_mask(response, objective["sequence_mask"]["delta"])
    return losses


def _objective(response: PublishedResponse, ratio: dict[str, Any]) -> Tensor:
    new, old, count = response.policy.exp(), response.old.exp(), len(response.policy)
    advantages, name = response.advantages, ratio["name"]
    if name == "cispo":  # 2506.13585, eq. 4 and 5
        weights = torch.clamp(new / old, ratio["floor"], ratio["cap"]).detach()
        return weights * advantages * response.policy
    if name in ("geometric", "rspo"):
        # 2507.20673: (prod_t |min(r_t A, clip(r_t) A)|)^(1 / n) sgn(A). Of 2510.23027 v2, eq. 5 to
        # 9: r_t times sg[max(gamma_t, floor)], gamma_t = exp(-Delta_t), before the clip.
        ratios, (advantage, *_) = new / old, advantages
        if name == "rspo":
            ratios = ratios * torch.exp(-response.movement).clamp(min=ratio["floor"]).detach()
        bounds = math.exp(-ratio["clip_low"]), math.exp(ratio["clip_high"])
        least = torch.minimum(ratios * advantage, ratios.clamp(*bounds) * advantage)
        return (least.abs().prod() ** (1 / count) * advantage.sign()).expand(count)
    ratios = new / old  # 1707.06347, eq. 7
    if name != "token":  # 2507.18071, eq. 13 and 14; eq. 5 to 7 have the same value and gradient
        ratios = (new.prod() / old.prod()).detach() ** (1 / count) * (new / new.detach())
    inside = ratios.clamp(1 - ratio["clip_low"], 1 + ratio["clip_high"])
    least = torch.minimum(ratios * advantages, inside * advantages)
    if ratio["dual_clip"] is None:
        return least
    # 1912.09729, eq. 5
    return torch.where(advantages < 0, torch.maximum(least, ratio["dual_clip"] * advantages), least)


def correction(response: PublishedResponse, settings: dict[str, Any]) -> Tensor:
    """Return pi_old / mu [n], truncated (TIS) or 0 outside its range (IcePop, 2510.18855).

    By sequence it is the geometric mean, slime's `geometric`; verl's `sequence` is the product.
    """
    ratios = response.old.exp() / response.engine.exp()
    if settings["level"] == "sequence":
        ratios = (ratios.prod() ** (1 / len(ratios))).expand_as(ratios)
    if settings["name"] == "tis":
        return torch.minimum(ratios, torch.full_like(ratios, settings["cap"]))
    outside = (ratios < settings["low"]) | (ratios > settings["high"])
    return torch.where(outside, torch.zeros_like(ratios), ratios)


def off_policy_mask(response: PublishedResponse, delta: float) -> Tensor:
    """Return M [n] of DeepSeek-V3.2 (2512.02556), whose pi_old is the engine's."""
    apart = torch.log(response.engine.exp() / response.policy.detach().exp()).mean()
    return 1.0 - ((response.advantages < 0) & (apart > delta)).double()


def kl_estimates(response: PublishedResponse, estimator: str, sampled: Tensor) -> Tensor:
    """Return Schulman's estimates [n]; `unbiased_k3` is DeepSeek-V3.2's, over what sampled."""
    quotient = response.reference.exp() / response.policy.exp()
    if estimator == "k1":
        return -quotient.log()
    if estimator == "k2":
        return quotient.log() ** 2 / 2
    k3 = quotient - 1 - quotient.log()
    return k3 * response.policy.exp() / sampled.exp() if estimator == "unbiased_k3" else k3


@dataclass(frozen=True)
class PublishedRewards:
    """A response's group, length in tokens, reward, weighted parts, and (end, reward) of steps."""

    group: int
    length: int
    reward: float
    weighted_parts: Sequence[tuple[float, float]] = ()
    steps: Sequence[tuple[int, float]] = ()


def advantages(batch: Sequence[PublishedRewards], settings: dict[str, Any]) -> list[np.ndarray]:
    """Return the advantages [length] of every response of one domain."""
    name, ddof = settings["name"], int(settings.get("std") == "sample")
    rewards = np.array([response.reward for response in batch])
    if name == "reinforce_pp":  # 2501.03262
        return _whitened(batch, rewards, settings, ddof)
    scores = np.zeros(len(batch))
    of_steps = [np.zeros(response.length) for response in batch]
    for number in {response.group for response in batch}:
        group = [place for place, response in enumerate(batch) if response.group == number]
        responses = [batch[place] for place in group]
        if name == "process":
            for place, values in zip(group, _of_steps(responses, ddof), strict=True):
                of_steps[place] = values
        else:
            scores[group] = _of_group(responses, rewards[group], settings, ddof)
    if name in ("reinforce_pp_baseline", "gdpo"):
        return _whitened(batch, scores, settings, ddof)
    return [values + score for values, score in zip(of_steps, scores, strict=True)]


def _of_group(
    responses: Sequence[PublishedRewards], rewards: np.ndarray, settings: dict[str, Any], ddof: int
) -> Any:
    name = settings["name"]
    if name in ("dr_grpo", "reinforce_pp_baseline"):  # 2503.20783; 2501.03262
        return rewards - rewards.mean()
    if name == "rloo":  # 2402.14740: R_i less the mean of the others
        return rewards - [np.delete(rewards, place).mean() for place in range(len(rewards))]
    if name == "grpo":  # 2402.03300, section 4.1.2
        return _standard(rewards, ddof)
    if name in ("mo_grpo", "gdpo"):  # 2509.22047; 2601.05242
        weighted = np.array(
            [response.weighted_parts for response in responses]
        )  # [response, part, 2]
        return sum(
            weights[0] * _standard(values, ddof) for weights, values in weighted.transpose(1, 2, 0)
        )
    assert name == "gfpo"  # 2508.09726: mean and deviation over the subset, 0 outside
    merit = [-float(response.length) for response in responses]
    if settings["by"] == "reward_per_token":
        merit = [response.reward / response.length for response in responses]
    subset = np.argsort(-np.array(merit), kind="stable")[: settings["keep"]]
    scores = np.zeros(len(rewards))
    scores[subset] = _standard(rewards[subset], ddof)
    return scores


def _of_steps(responses: Sequence[PublishedRewards], ddof: int) -> list[np.ndarray]:
    """Return process supervision's (2402.03300, section 4.1.3): steps that end at t or later."""
    rewards = np.array([reward for response in responses for _, reward in response.steps])
    deviation = rewards.std(ddof=ddof) + FLOOR
    values = [np.zeros(response.length) for response in responses]
    for response, of_tokens in zip(responses, values, strict=True):
        for end, reward in response.steps:
            of_tokens[: end + 1] += (reward - rewards.mean()) / deviation
    return values


def _standard(values: np.ndarray, ddof: int) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=ddof) + FLOOR)


def _whitened(
    batch: Sequence[PublishedRewards], scores: np.ndarray, settings: dict[str, Any], ddof: int
) -> list[np.ndarray]:
    """Return scores by the batch's mean and deviation; over tokens as verl's masked_whiten."""
    lengths = [response.length for response in batch]
    items = np.repeat(scores, lengths) if settings.get("over") == "tokens" else scores
    whitened = (scores - items.mean()) / (items.std(ddof=ddof) + FLOOR)
    return [np.full(length, value) for length, value in zip(lengths, whitened, strict=True)]
