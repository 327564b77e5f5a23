"""The policy's loss of one sample, token by token, from the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stages.audit.blocks import SHARED, RecordedObjective
from stages.audit.model import Model

LIMIT = 20.0  # of a log-ratio, in nats


@dataclass(frozen=True)
class Facts:
    """The inputs of the loss of one sample's n learned tokens, each [n], log-probabilities in nats.

    `logprobs` are the policy's, with gradient; `stale` is true where older weights sampled any of
    it; `full_kl` is the exact KL to the reference where that is the penalty.
    """

    logprobs: torch.Tensor
    old: torch.Tensor
    engine: torch.Tensor
    advantages: torch.Tensor
    stale: bool
    reference: torch.Tensor | None = None
    full_kl: torch.Tensor | None = None
    router_movement: torch.Tensor | None = None


@dataclass(frozen=True)
class Terms:
    """The loss of one sample's tokens [n] without its KL, the KL, and the metrics.

    `correction` and `masked`, the tokens that the sequence mask drops, are None where unused.
    """

    surrogate: torch.Tensor
    kl: torch.Tensor | None
    ratio: torch.Tensor
    clipped: torch.Tensor
    correction: torch.Tensor | None
    masked: torch.Tensor | None


class Objective:
    """An objective in a step: its settings, its reference, and what it learns.

    `state`, of the checkpoint before the step, has the KL coefficient and the exponent of lambda;
    an `ema` reference moves, and objectives of one decay have one.
    """

    def __init__(
        self, of: RecordedObjective, state: Mapping[str, Any], reference: Model | None
    ) -> None:
        self.name, self.domains, self.settings = of.name, of.domains, of.settings
        self.reference = reference
        known = state.get("objectives", {}).get(of.name, {}) if of.name != SHARED else state
        kl = of.settings["kl"]
        learned = known if kl["target"] is not None else {}
        self.coefficient: float = learned.get("kl_coefficient", kl["coefficient"])
        self.exponent: float = known.get("length_exponent", 0.0)

    def corrects_all(self, replay: bool) -> bool:
        """Return whether samples of the present weights are corrected too."""
        whose = self.settings["correction"].get("samples", "auto")
        return bool(whose == "all" or (whose == "auto" and not replay))

    def learn(self, logged: Mapping[str, float], slope: float) -> dict[str, float]:
        """Update the coefficients by the metrics of an update; return those before it.

        `slope` is the loss's derivative by the exponent.
        """
        kl, found = self.settings["kl"], dict[str, float]()
        if kl["target"] is not None:
            found |= self._named("kl_coefficient", self.coefficient)
            measured = logged.get("kl" if self.name == SHARED else f"kl/{self.name}")
            if measured is not None:
                error = max(-0.2, min((measured - kl["target"]) / kl["target"], 0.2))
                self.coefficient *= 1 + 0.1 * error
        if self.settings["aggregation"] == "lambda":
            found |= self._named("length_exponent", self.exponent)
            self.exponent -= self.settings["lambda_learning_rate"] * slope
        return found

    def _named(self, name: str, value: float) -> dict[str, float]:
        shared = {name: value} if self.name == SHARED else {}
        several = {f"{name}/{domain}": value for domain in self.domains}
        return shared | (several if self.name != SHARED or len(self.domains) > 1 else {})


def terms(facts: Facts, objective: dict[str, Any], correct_all: bool) -> Terms:
    """Return the terms by the resolved settings of an objective."""
    loss, ratio, clipped = _surrogate(facts, objective["ratio"])
    if (correction := _correction(facts, objective["correction"], correct_all)) is not None:
        loss = loss * correction
    masked = None
    if objective["sequence_mask"]["enabled"]:
        moved = (facts.engine - facts.logprobs.detach()).mean()
        masked = (facts.advantages < 0) & (moved > objective["sequence_mask"]["delta"])
        loss = torch.where(masked, torch.zeros_like(loss), loss)
    kl = _penalty(facts, objective["kl"]["estimator"])
    return Terms(loss, kl, ratio.detach(), clipped, correction, masked)


def _exp(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LIMIT, LIMIT).exp()


def _surrogate(
    facts: Facts, settings: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    name, advantage = settings["name"], facts.advantages
    log_ratio = facts.logprobs - facts.old
    if name == "rspo":
        assert facts.router_movement is not None
        gamma = torch.exp(-facts.router_movement).clamp(min=settings["floor"])
        log_ratio = log_ratio + gamma.log()
    if name in ("geometric", "rspo"):
        low, high = settings["clip_low"], settings["clip_high"]
        bounded = torch.where(advantage >= 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
        ratio = _exp(bounded.mean()).expand_as(advantage)
        return -ratio * advantage, ratio, bounded != log_ratio
    if name == "cispo":
        ratio = _exp(log_ratio).detach()
        weight = ratio.clamp(max=settings["cap"]).clamp(min=settings.get("floor", 0.0))
        return -weight * advantage * facts.logprobs, ratio, weight != ratio
    if name == "token":
        ratio = _exp(log_ratio)
    elif name == "sequence":
        ratio = _exp(log_ratio.mean()).expand_as(advantage)
    else:
        assert name == "sequence_token", name
        own = torch.exp(facts.logprobs - facts.logprobs.detach())
        ratio = _exp(log_ratio.mean()).detach() * own
    inside = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
    clipped = inside * advantage < ratio * advantage
    gain = torch.where(clipped, inside * advantage, ratio * advantage)
    if settings["dual_clip"] is not None:
        least = settings["dual_clip"] * advantage
        second = (advantage < 0) & (gain < least)
        gain, clipped = torch.where(second, least, gain), clipped | second
    return -gain, ratio, clipped


def _correction(facts: Facts, settings: dict[str, Any], correct_all: bool) -> torch.Tensor | None:
    if settings["name"] == "none":
        return None
    log_ratio = facts.old - facts.engine
    if settings["level"] == "sequence":
        log_ratio = log_ratio.mean().expand_as(log_ratio)
    ratio = _exp(log_ratio)
    if settings["name"] == "tis":
        weight = ratio.clamp(max=settings["cap"])
    else:
        inside = (ratio >= settings["low"]) & (ratio <= settings["high"])
        weight = torch.where(inside, ratio, torch.zeros_like(ratio))
    return weight if correct_all or facts.stale else torch.ones_like(weight)


def _penalty(facts: Facts, estimator: str) -> torch.Tensor | None:
    if estimator == "full" or facts.reference is None:
        return facts.full_kl
    difference = facts.reference - facts.logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    k3 = _exp(difference) - difference - 1
    if estimator == "k3":
        return k3
    sampled = facts.engine if facts.stale else facts.old
    return _exp(facts.logprobs - sampled) * k3
