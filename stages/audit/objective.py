"""The policy's loss of one sample, token by token, from the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stages.audit.blocks import SHARED, RecordedObjective
from stages.audit.formulas import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, RATIOS
from stages.audit.model import Model
from stages.audit.recorded import NotAuditable

LIMIT = 20.0  # of a log-ratio, in nats


@dataclass(frozen=True)
class Facts:
    """The inputs of the loss of one sample's n learned tokens, each [n], log-probabilities in nats.

    `logprobs` are the policy's, with gradient; `stale` is true where older weights sampled any of
    it; `full_kl` is the exact KL to the reference, over the ids that each token was sampled from,
    where that is the penalty.
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


@dataclass(frozen=True)
class UpdateCounts:
    """The counts of an update, of all domains, that its means are over.

    `longest` is the largest number of tokens that a response may have.
    """

    sequences: int
    tokens: int
    longest: int


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
        saved = state.get("objectives", {}).get(of.name, {}) if of.name != SHARED else state
        kl = of.settings["kl"]
        learned = saved if kl["target"] is not None else {}
        self.coefficient: float = learned.get("kl_coefficient", kl["coefficient"])
        self.exponent: float = saved.get("length_exponent", 0.0)

    def corrects_all(self, replay: bool) -> bool:
        """Return whether samples of the present weights are corrected too."""
        whose = self.settings["correction"].get("samples", "auto")
        return bool(whose == "all" or (whose == "auto" and not replay))

    def learn(self, logged: Mapping[str, float], slope: float) -> dict[str, float]:
        """Update the coefficients by the metrics of an update; return those before it.

        `slope` is the loss's derivative by the exponent.
        """
        kl, before = self.settings["kl"], dict[str, float]()
        if kl["target"] is not None:
            before |= self._logged_as("kl_coefficient", self.coefficient)
            measured = logged.get("kl" if self.name == SHARED else f"kl/{self.name}")
            if measured is not None:
                error = max(-0.2, min((measured - kl["target"]) / kl["target"], 0.2))
                self.coefficient *= 1 + 0.1 * error
        if self.settings["aggregation"] == "lambda":
            before |= self._logged_as("length_exponent", self.exponent)
            self.exponent -= self.settings["lambda_learning_rate"] * slope
        return before

    def _logged_as(self, name: str, value: float) -> dict[str, float]:
        shared = {name: value} if self.name == SHARED else {}
        several = {f"{name}/{domain}": value for domain in self.domains}
        return shared | (several if self.name != SHARED or len(self.domains) > 1 else {})


def terms(facts: Facts, objective: dict[str, Any], correct_all: bool) -> Terms:
    """Return the terms by the resolved settings of an objective.

    Values and gradients are each written out from the papers, rather than one differentiated: a
    formula with the right value may spread its gradient over other tokens.

    Raises:
        NotAuditable: the audit has no formula for a part of the objective, or the ratio and the
            correction have no common one.
    """
    surrogate = RATIOS.find(objective["ratio"]["name"])
    value, slope, ratio, clipped = surrogate(facts, objective["ratio"])
    correction = _correction(facts, objective["correction"], correct_all)
    if correction is not None:
        by_token = objective["correction"]["level"] == "token"
        if by_token and objective["ratio"]["name"] in ("geometric", "rspo"):
            raise NotAuditable("objective.correction.level: token is not defined for this ratio")
        # Token j of a response that mu sampled adds w_j c_j grad log pi_j (TIS; IcePop, 2510.18855,
        # whose w_j is 0 where it masks; under one ratio a response, as verl's GSPO, in the form of
        # 2507.18071, eq. 13), c_j being what it adds to an uncorrected gradient.
        value, slope = value * correction, slope * correction
    masked = None
    if objective["sequence_mask"]["enabled"]:  # 2512.02556: not the KL; its pi_old is the engine's
        moved = (facts.engine - facts.logprobs.detach()).mean()
        masked = (facts.advantages < 0) & (moved > objective["sequence_mask"]["delta"])
        value, slope = value.masked_fill(masked, 0.0), slope.masked_fill(masked, 0.0)
    loss = value + slope * (facts.logprobs - facts.logprobs.detach())
    kl = _penalty(facts, objective["kl"]["estimator"])
    return Terms(loss, kl, ratio, clipped, correction, masked)


def _exp(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LIMIT, LIMIT).exp()


Surrogate = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# Each ratio returns of every token its loss, c, its ratio, and whether a clip binds, without
# gradient. c_j is d(sum of the response's losses) / d log pi_j.


@RATIOS.register("cispo")
def _cispo(facts: Facts, settings: dict[str, Any]) -> Surrogate:
    """Return sg[clip(r_t)] A log pi_t (2506.13585, eq. 4)."""
    advantage, logprobs = facts.advantages, facts.logprobs.detach()
    ratio = _exp(logprobs - facts.old)
    weight = ratio.clamp(max=settings["cap"]).clamp(min=settings.get("floor", 0.0))
    return -weight * advantage * logprobs, -weight * advantage, ratio, weight != ratio


@RATIOS.register("geometric", "rspo")
def _geometric(facts: Facts, settings: dict[str, Any]) -> Surrogate:
    """Return (prod_t |min(r_t A, clip(r_t) A)|)^(1/n) sgn(A), clipped as verl does (2507.20673).

    That is s A, s = exp of the mean of log r_t, from above where A > 0 and from below where A < 0.
    d(n s A) / d log r_j = s A, and 0 of a clipped token.
    """
    advantage, log_ratio = facts.advantages, facts.logprobs.detach() - facts.old
    if settings["name"] == "rspo":
        # 2510.23027 v2, eq. 5-9: gamma_t r_t in place of r_t, gamma_t without gradient. In v1
        # gamma_t was a factor after the clip.
        assert facts.router_movement is not None
        log_ratio = log_ratio - facts.router_movement.clamp(max=-math.log(settings["floor"]))
    good = advantage >= 0
    high = torch.full_like(advantage, settings["clip_high"])
    low = torch.full_like(advantage, -settings["clip_low"])
    clipped = torch.where(good, log_ratio > high, log_ratio < low)
    mean = torch.where(clipped, torch.where(good, high, low), log_ratio).mean()
    ratio = _exp(mean).expand_as(advantage)
    learned = ~clipped & (mean.abs() <= LIMIT)
    return -ratio * advantage, -ratio * advantage * learned, ratio, clipped


@RATIOS.register("token")
def _token(facts: Facts, settings: dict[str, Any]) -> Surrogate:
    """Return min(r_t A, clip(r_t) A) (1707.06347, eq. 7)."""
    log_ratio = facts.logprobs.detach() - facts.old
    free = log_ratio.abs() <= LIMIT
    return _clipped(_exp(log_ratio), free, facts.advantages, settings)


@RATIOS.register("sequence", "sequence_token")
def _sequence(facts: Facts, settings: dict[str, Any]) -> Surrogate:
    """Return min(s_i A, clip(s_i) A) (2507.18071, eq. 5-7 and 13-14).

    d(n s_i A_i) / d log pi_j = s_i A_i (eq. 10, 17).
    """
    mean = (facts.logprobs.detach() - facts.old).mean()
    free = (mean.abs() <= LIMIT) | torch.tensor(settings["name"] == "sequence_token")
    return _clipped(_exp(mean).expand_as(facts.advantages), free, facts.advantages, settings)


def _clipped(
    ratio: torch.Tensor, free: torch.Tensor, advantage: torch.Tensor, settings: dict[str, Any]
) -> Surrogate:
    """Return PPO's clip of ratios, which have gradient where `free`."""
    inside = ratio.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
    clipped = inside * advantage < ratio * advantage
    gain = torch.where(clipped, inside * advantage, ratio * advantage)
    if settings["dual_clip"] is not None:
        least = settings["dual_clip"] * advantage
        second = (advantage < 0) & (gain < least)
        gain, clipped = torch.where(second, least, gain), clipped | second
    return -gain, -ratio * advantage * (free & ~clipped), ratio, clipped


def _correction(facts: Facts, settings: dict[str, Any], correct_all: bool) -> torch.Tensor | None:
    if settings["name"] == "none":
        return None
    log_ratio = facts.old - facts.engine
    if settings["level"] == "sequence":  # slime's geometric; verl's and TRL's is the product
        log_ratio = log_ratio.mean().expand_as(log_ratio)
    weight: torch.Tensor = CORRECTIONS.find(settings["name"])(_exp(log_ratio), settings)
    return weight if correct_all or facts.stale else torch.ones_like(weight)


@CORRECTIONS.register("tis")
def _tis(ratio: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    return ratio.clamp(max=settings["cap"])


@CORRECTIONS.register("icepop")
def _icepop(ratio: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    inside = (ratio >= settings["low"]) & (ratio <= settings["high"])
    return torch.where(inside, ratio, torch.zeros_like(ratio))


def _penalty(facts: Facts, estimator: str) -> torch.Tensor | None:
    if estimator == "full" or facts.reference is None:
        return facts.full_kl
    kl: torch.Tensor = KL_ESTIMATORS.find(estimator)(facts, facts.reference - facts.logprobs)
    return kl


@KL_ESTIMATORS.register("k1")
def _k1(facts: Facts, difference: torch.Tensor) -> torch.Tensor:
    return -difference


@KL_ESTIMATORS.register("k2")
def _k2(facts: Facts, difference: torch.Tensor) -> torch.Tensor:
    return difference**2 / 2


@KL_ESTIMATORS.register("k3")
def _k3(facts: Facts, difference: torch.Tensor) -> torch.Tensor:
    return _exp(difference) - difference - 1


@KL_ESTIMATORS.register("unbiased_k3")
def _unbiased_k3(facts: Facts, difference: torch.Tensor) -> torch.Tensor:
    sampled = facts.engine if facts.stale else facts.old
    return _exp(facts.logprobs - sampled) * _k3(facts, difference)


def aggregate(values: torch.Tensor, name: str, counts: UpdateCounts) -> torch.Tensor:
    """Return the part that one sample's `values` [n] have in the mean over the update.

    Raises:
        NotAuditable: the audit has no formula for the aggregation.
    """
    mean: torch.Tensor = AGGREGATIONS.find(name)(values, counts)
    return mean


@AGGREGATIONS.register("sequence_mean")
def _sequence_mean(values: torch.Tensor, counts: UpdateCounts) -> torch.Tensor:
    return values.mean() / counts.sequences


@AGGREGATIONS.register("constant")
def _constant(values: torch.Tensor, counts: UpdateCounts) -> torch.Tensor:
    return values.sum() / (counts.sequences * counts.longest)


@AGGREGATIONS.register("token_mean", "lambda")
def _token_mean(values: torch.Tensor, counts: UpdateCounts) -> torch.Tensor:
    # Of `lambda` the caller multiplies this by the weight of the response.
    return values.sum() / counts.tokens
